/* Vectors of float32 for the processors of one level, and what is done with them everywhere. Included once per level. */
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef float stored_lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef uint32_t uints __attribute__((vector_size(LANES * sizeof(uint32_t))));
typedef int32_t stored_ints __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4), may_alias));
typedef int32_t stored_pairs __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(2), may_alias));

#define LOAD(pointer) (*(const stored_lanes *)(pointer))
#define STORE(pointer, v) (*(stored_lanes *)(pointer) = (v))
#define LOAD_INTS(pointer) (*(const stored_ints *)(pointer))

/* The rows of this thread among the threads of a parallel region: first row, row after the last. */
#define SHARE(rows) (rows) * omp_get_thread_num() / omp_get_num_threads(), \
                    (rows) * (omp_get_thread_num() + 1) / omp_get_num_threads()

#define PICK(mask, a, b) ((lanes)(((ints)(a) & (mask)) | ((ints)(b) & ~(mask))))

/* The lanes i ^ 1, i ^ 2 and so on of v; MIN(a, b) is a < b ? a : b, MAX(a, b) is a > b ? a : b, in every lane, MAX_INTS
 * the same of integers;
 * MULTIPLY_ADD(v, sign, w) is v * sign + w for a sign of 1 or -1, where one rounding or two are the same. */
#if LANES == 16
#define SWAP_1(v) __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define SWAP_2(v) __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SWAP_4(v) __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define SWAP_8(v) __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
#define MIN(a, b) ((lanes)_mm512_min_ps((__m512)(a), (__m512)(b)))
#define MAX(a, b) ((lanes)_mm512_max_ps((__m512)(a), (__m512)(b)))
#define MULTIPLY_ADD(v, sign, w) ((lanes)_mm512_fmadd_ps((__m512)(v), (__m512)(sign), (__m512)(w)))
#define MAX_INTS(a, b) ((ints)_mm512_max_epi32((__m512i)(a), (__m512i)(b)))
#define TRUNCATE(v) ((ints)_mm512_cvttps_epi32((__m512)(v)))
#elif LANES == 8
#define SWAP_1(v) __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6)
#define SWAP_2(v) __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5)
#define SWAP_4(v) __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3)
#define MIN(a, b) ((lanes)_mm256_min_ps((__m256)(a), (__m256)(b)))
#define MAX(a, b) ((lanes)_mm256_max_ps((__m256)(a), (__m256)(b)))
#define MULTIPLY_ADD(v, sign, w) ((lanes)_mm256_fmadd_ps((__m256)(v), (__m256)(sign), (__m256)(w)))
#define MAX_INTS(a, b) ((ints)_mm256_max_epi32((__m256i)(a), (__m256i)(b)))
#define TRUNCATE(v) ((ints)_mm256_cvttps_epi32((__m256)(v)))
#else
#define SWAP_1(v) __builtin_shufflevector(v, v, 1, 0, 3, 2)
#define SWAP_2(v) __builtin_shufflevector(v, v, 2, 3, 0, 1)
#ifdef __x86_64__
#define MIN(a, b) ((lanes)_mm_min_ps((__m128)(a), (__m128)(b)))
#define MAX(a, b) ((lanes)_mm_max_ps((__m128)(a), (__m128)(b)))
#define TRUNCATE(v) ((ints)_mm_cvttps_epi32((__m128)(v)))
#else
#define MIN(a, b) PICK((a) < (b), a, b)
#define MAX(a, b) PICK((a) > (b), a, b)
#define TRUNCATE(v) __builtin_convertvector(v, ints)
#endif
#define MAX_INTS(a, b) ((ints)PICK((a) > (b), a, b))
#define MULTIPLY_ADD(v, sign, w) ((v) * (sign) + (w))
#endif

/* Lanes i of v, and i of w if bit h of i is set; and the lanes i ^ h of the same. */
#if LANES == 16
#define BLEND_1(v, w) __builtin_shufflevector(v, w, 0, 17, 2, 19, 4, 21, 6, 23, 8, 25, 10, 27, 12, 29, 14, 31)
#define CROSS_1(v, w) __builtin_shufflevector(v, w, 1, 16, 3, 18, 5, 20, 7, 22, 9, 24, 11, 26, 13, 28, 15, 30)
#define BLEND_2(v, w) __builtin_shufflevector(v, w, 0, 1, 18, 19, 4, 5, 22, 23, 8, 9, 26, 27, 12, 13, 30, 31)
#define CROSS_2(v, w) __builtin_shufflevector(v, w, 2, 3, 16, 17, 6, 7, 20, 21, 10, 11, 24, 25, 14, 15, 28, 29)
#define BLEND_4(v, w) __builtin_shufflevector(v, w, 0, 1, 2, 3, 20, 21, 22, 23, 8, 9, 10, 11, 28, 29, 30, 31)
#define CROSS_4(v, w) __builtin_shufflevector(v, w, 4, 5, 6, 7, 16, 17, 18, 19, 12, 13, 14, 15, 24, 25, 26, 27)
#define BLEND_8(v, w) __builtin_shufflevector(v, w, 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31)
#define CROSS_8(v, w) __builtin_shufflevector(v, w, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23)
#elif LANES == 8
#define BLEND_1(v, w) __builtin_shufflevector(v, w, 0, 9, 2, 11, 4, 13, 6, 15)
#define CROSS_1(v, w) __builtin_shufflevector(v, w, 1, 8, 3, 10, 5, 12, 7, 14)
#define BLEND_2(v, w) __builtin_shufflevector(v, w, 0, 1, 10, 11, 4, 5, 14, 15)
#define CROSS_2(v, w) __builtin_shufflevector(v, w, 2, 3, 8, 9, 6, 7, 12, 13)
#define BLEND_4(v, w) __builtin_shufflevector(v, w, 0, 1, 2, 3, 12, 13, 14, 15)
#define CROSS_4(v, w) __builtin_shufflevector(v, w, 4, 5, 6, 7, 8, 9, 10, 11)
#else
#define BLEND_1(v, w) __builtin_shufflevector(v, w, 0, 5, 2, 7)
#define CROSS_1(v, w) __builtin_shufflevector(v, w, 1, 4, 3, 6)
#define BLEND_2(v, w) __builtin_shufflevector(v, w, 0, 1, 6, 7)
#define CROSS_2(v, w) __builtin_shufflevector(v, w, 2, 3, 4, 5)
#endif

/* The first and the second of every two lanes of v and w, one after the other. */
#if LANES == 16
#define EVEN(v, w) __builtin_shufflevector(v, w, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(v, w) __builtin_shufflevector(v, w, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)
#elif LANES == 8
#define EVEN(v, w) __builtin_shufflevector(v, w, 0, 2, 4, 6, 8, 10, 12, 14)
#define ODD(v, w) __builtin_shufflevector(v, w, 1, 3, 5, 7, 9, 11, 13, 15)
#else
#define EVEN(v, w) __builtin_shufflevector(v, w, 0, 2, 4, 6)
#define ODD(v, w) __builtin_shufflevector(v, w, 1, 3, 5, 7)
#endif

/* The lanes of v and w by turns: the reverse of EVEN and ODD. */
#if LANES == 16
#define TURNS_LOW(v, w) __builtin_shufflevector(v, w, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define TURNS_HIGH(v, w) __builtin_shufflevector(v, w, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#elif LANES == 8
#define TURNS_LOW(v, w) __builtin_shufflevector(v, w, 0, 8, 1, 9, 2, 10, 3, 11)
#define TURNS_HIGH(v, w) __builtin_shufflevector(v, w, 4, 12, 5, 13, 6, 14, 7, 15)
#else
#define TURNS_LOW(v, w) __builtin_shufflevector(v, w, 0, 4, 1, 5)
#define TURNS_HIGH(v, w) __builtin_shufflevector(v, w, 2, 6, 3, 7)
#endif

/* Signs 1 and -1 of lanes i with bit h of i not set and set. */
INLINE lanes alternating(int h) {
    lanes v = {0};
    for (int i = 0; i < LANES; i++) v[i] = i & h ? -1.0f : 1.0f;
    return v;
}

INLINE lanes all(float value) {
    lanes zero = {0};
    return value - zero; /* unlike a sum, this leaves -0 alone, so that compilers can leave it out */
}

/* The first `count` of fewer numbers than there are lanes, and `rest` in the other lanes. */
INLINE lanes load_some(const float *from, int count, float rest) {
#if LANES == 16
    return (lanes)_mm512_mask_loadu_ps(_mm512_set1_ps(rest), (__mmask16)((1u << count) - 1), from);
#else
    lanes v = all(rest);
    for (int i = 0; i < count; i++) v[i] = from[i];
    return v;
#endif
}

INLINE void store_some(float *to, int count, lanes v) {
#if LANES == 16
    _mm512_mask_storeu_ps(to, (__mmask16)((1u << count) - 1), (__m512)v);
#else
    for (int i = 0; i < count; i++) to[i] = v[i];
#endif
}

/* Whether a lane of v is NaN. */
INLINE int any_nan(lanes v) {
#if LANES == 16
    return _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q) != 0;
#elif LANES == 8
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, (__m256)v, _CMP_UNORD_Q)) != 0;
#elif defined(__x86_64__)
    return _mm_movemask_ps(_mm_cmpunord_ps((__m128)v, (__m128)v)) != 0;
#else
    ints differs = v != v;
    return (differs[0] | differs[1] | differs[2] | differs[3]) != 0;
#endif
}

/* As many bytes as there are lanes, as integers. */
INLINE ints load_bytes(const uint8_t *from) {
#if LANES == 16
    return (ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif LANES == 8
    return (ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    ints v = {from[0], from[1], from[2], from[3]};
    return v;
#endif
}

/* The reverse, of integers from 0 to 255. */
INLINE void store_bytes(uint8_t *to, ints v) {
#if LANES == 16
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8((__m512i)v));
#elif LANES == 8
    __m128i words = _mm_packus_epi32(_mm256_castsi256_si128((__m256i)v), _mm256_extracti128_si256((__m256i)v, 1));
    _mm_storel_epi64((__m128i *)to, _mm_packus_epi16(words, words));
#elif defined(__x86_64__)
    __m128i words = _mm_packs_epi32((__m128i)v, (__m128i)v);
    int32_t joined = _mm_cvtsi128_si32(_mm_packus_epi16(words, words));
    memcpy(to, &joined, 4);
#else
    for (int i = 0; i < LANES; i++) to[i] = (uint8_t)v[i];
#endif
}

INLINE float lanes_sum(lanes v) {
#if LANES >= 16
    v += SWAP_8(v);
#endif
#if LANES >= 8
    v += SWAP_4(v);
#endif
    v += SWAP_2(v), v += SWAP_1(v);
    return v[0];
}

INLINE uint16_t bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)(bits >> 16);
}

INLINE float from_bfloat16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

#define ROUNDING 12582912.0f /* 1.5 * 2^23: a number that is added to it is rounded to an integer */

/* e^x for x from -87 to 88, within 2 units in the last place. A NaN stays one.
 * x = n log 2 + r; log 2 in two parts, so that r is exact, and e^r by its polynomial of degree 7 (Cephes). */
INLINE lanes exponential(lanes x) {
    lanes shifted = x * 1.44269504f + ROUNDING, n = shifted - ROUNDING;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    return y * (lanes)(((ints)shifted << 23) + 0x3F800000); /* times 2^n */
}
