/* A function compiled for several generations of the processor; the loader takes the one that fits. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__)
#define VARIANTS __attribute__((target_clones("arch=x86-64-v4", "default")))
#else
#define VARIANTS
#endif
