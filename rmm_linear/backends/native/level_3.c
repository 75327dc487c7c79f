/* The library for x86-64 processors with AVX2. */
#ifdef __x86_64__
#include <immintrin.h>
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("arch=x86-64-v3"))), apply_to = function)
#else
#pragma GCC target("arch=x86-64-v3")
#endif
#define LANES 8
#define V(name) name##_3
#include "library.h"
#ifdef __clang__
#pragma clang attribute pop
#endif
#endif
