/* The library for x86-64 processors with AVX-512. */
#ifdef __x86_64__
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("arch=x86-64-v4"))), apply_to = function)
#else
#pragma GCC target("arch=x86-64-v4")
#endif
#define LANES 16
#define V(name) name##_4
#include "library.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
