/* Compiles a function for several generations of processors; the loader picks the one for this machine. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__)
#define VARIANTS __attribute__((target_clones("arch=x86-64-v4", "default")))
#else
#define VARIANTS
#endif

#include <omp.h>

/* The rows of this thread among the threads of a parallel region: first row, row after the last. */
#define SHARE(rows) (rows) * omp_get_thread_num() / omp_get_num_threads(), \
                    (rows) * (omp_get_thread_num() + 1) / omp_get_num_threads()
