/* Rows of float32, bfloat16 and float16 numbers: read as float32, and rounded to their type, ties to even. */

enum { FLOAT32, BFLOAT16, FLOAT16 };

INLINE float from_float16(uint16_t value) {
    uint32_t sign = (uint32_t)(value & 0x8000) << 16, body = (uint32_t)(value & 0x7FFF) << 13, bits;
    float number;
    memcpy(&number, &body, 4);
    number *= 0x1p112f; /* the exponents' biases differ by 112; small numbers become normal */
    memcpy(&bits, &number, 4);
    bits = (body >= 0x7C00u << 13 ? body | 0x7F800000 : bits) | sign;
    memcpy(&number, &bits, 4);
    return number;
}

INLINE uint16_t to_float16(float number) {
    uint32_t bits, sign;
    memcpy(&bits, &number, 4);
    sign = bits >> 16 & 0x8000, bits &= 0x7FFFFFFF;
    if (bits > 0x7F800000) return (uint16_t)(sign | 0x7E00);
    if (bits >= 0x477FF000) return (uint16_t)(sign | 0x7C00); /* 65520 and more */
    if (bits < 0x38800000) {                                   /* below 2^-14: steps of 2^-24, which a sum rounds to */
        float magnitude;
        memcpy(&magnitude, &bits, 4);
        magnitude += 0.5f;
        memcpy(&bits, &magnitude, 4);
        return (uint16_t)(sign | (bits - 0x3F000000));
    }
    bits += 0xFFF + (bits >> 13 & 1);
    return (uint16_t)(sign | ((bits >> 13) - (112 << 10)));
}

INLINE uint16_t to_bfloat16(float number) {
    uint32_t bits;
    memcpy(&bits, &number, 4);
    int is_nan = (bits & 0x7FFFFFFF) > 0x7F800000;
    return is_nan ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

INLINE float element(const void *m, int type, int64_t at) {
    if (type == FLOAT32) return ((const float *)m)[at];
    uint16_t value = ((const uint16_t *)m)[at];
    return type == BFLOAT16 ? from_bfloat16(value) : from_float16(value);
}

INLINE lanes load_elements(const void *m, int type, int64_t at) {
    if (type == FLOAT32) return LOAD((const float *)m + at);
    const uint16_t *from = (const uint16_t *)m + at;
#if LANES == 16
    __m256i half = _mm256_loadu_si256((const __m256i *)from);
    if (type == FLOAT16) return (lanes)_mm512_cvtph_ps(half);
    return (lanes)_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
#elif LANES == 8
    __m128i half = _mm_loadu_si128((const __m128i *)from);
    if (type == FLOAT16) return (lanes)_mm256_cvtph_ps(half);
    return (lanes)_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16);
#else
    lanes v;
    for (int i = 0; i < LANES; i++) v[i] = element(from, type, i);
    return v;
#endif
}

/* v in bfloat16: in the lower halves of the lanes. */
INLINE ints bfloat16_lanes(lanes v) {
    ints bits = (ints)v, odd = (bits >> 16) & 1, is_nan = (ints)(v != v);
    bits = ((bits + 0x7FFF + odd) >> 16) & 0xFFFF;
    return (bits & ~is_nan) | (is_nan & 0x7FC0);
}

INLINE lanes rounded_to_bfloat16(lanes v) { return (lanes)(bfloat16_lanes(v) << 16); }

INLINE void store_elements(void *m, int type, int64_t at, lanes v) {
    if (type == FLOAT32) {
        STORE((float *)m + at, v);
        return;
    }
    uint16_t *to = (uint16_t *)m + at;
#if LANES >= 8
    if (type == FLOAT16) {
#if LANES == 16
        _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#else
        _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#endif
        return;
    }
    ints bits = bfloat16_lanes(v);
#if LANES == 16
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)bits));
#else
    __m256i words = (__m256i)bits;
    _mm_storeu_si128(
        (__m128i *)to, _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
#endif
#else
    for (int i = 0; i < LANES; i++) to[i] = type == BFLOAT16 ? to_bfloat16(v[i]) : to_float16(v[i]);
#endif
}

/* Whether two of its elements are read as one number, the first of them in the lower half. */
#define IS_SPLIT(type) ((type) == BFLOAT16 && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__)

/* Two vectors of elements that lie side by side; if they are split, in the order even, odd: that takes no shuffles. */
INLINE void load_two(const void *m, int type, int64_t at, lanes v[2]) {
    if (IS_SPLIT(type)) {
        ints both = *(const stored_pairs *)((const uint16_t *)m + at);
        v[0] = (lanes)(both << 16), v[1] = (lanes)(both & (int32_t)0xFFFF0000);
    } else v[0] = load_elements(m, type, at), v[1] = load_elements(m, type, at + LANES);
}

/* `count` elements as float32: where they are, or in `buffer`. */
INLINE const float *widened(const void *m, int type, int64_t at, int64_t count, float *buffer) {
    if (type == FLOAT32) return (const float *)m + at;
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) STORE(buffer + i, load_elements(m, type, at + i));
    for (; i < count; i++) buffer[i] = element(m, type, at + i);
    return buffer;
}

INLINE void store_element(void *m, int type, int64_t at, float value) {
    if (type == FLOAT32) ((float *)m)[at] = value;
    else ((uint16_t *)m)[at] = type == BFLOAT16 ? to_bfloat16(value) : to_float16(value);
}

/* Rounds `count` numbers to a type. */
INLINE void narrow(const float *from, int type, int64_t count, void *m, int64_t at) {
    int64_t i = 0;
    for (; i + LANES <= count; i += LANES) store_elements(m, type, at + i, LOAD(from + i));
    for (; i < count; i++) store_element(m, type, at + i, from[i]);
}
