/* The library for any processor: SSE2 on x86-64, NEON on aarch64, whatever there is elsewhere. */
#ifdef __x86_64__
#include <immintrin.h>
#endif
#define LANES 4
#define V(name) name##_0
#include "library.h"

/* The highest level that this processor runs; its functions' names end with it. */
int rmm_level(void) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
        return 4;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")) return 3;
#endif
    return 0;
}
