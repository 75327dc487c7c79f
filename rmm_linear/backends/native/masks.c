/* Masks in one bit per element: rmm_linear/packing/masks.py in compiled form. */

INLINE uint8_t byte_of(const void *mask, int size, int64_t at, int count) {
    uint8_t byte = 0;
    for (int i = 0; i < count; i++) {
        int is_kept = size == 4   ? ((const float *)mask)[at + i] != 0
                      : size == 2 ? (((const uint16_t *)mask)[at + i] & 0x7FFF) != 0
                                  : ((const uint8_t *)mask)[at + i] != 0;
        byte |= is_kept << i;
    }
    return byte;
}

/* Bits of the elements that are not zero: 64 at a time, then 8, then the rest. */
INLINE void pack_mask_row(const void *mask, int size, int64_t place, int64_t columns, uint8_t *to) {
    int64_t i = 0;
#if LANES >= 8
    for (; i + 64 <= columns; i += 64) {
        uint64_t bits = 0;
        if (size == 4)
            for (int k = 0; k < 64; k += LANES) {
                const float *from = (const float *)mask + place + i + k;
#if LANES == 16
                uint64_t part = _mm512_cmp_ps_mask(_mm512_loadu_ps(from), _mm512_setzero_ps(), _CMP_NEQ_UQ);
#else
                __m256 differs = _mm256_cmp_ps(_mm256_loadu_ps(from), _mm256_setzero_ps(), _CMP_NEQ_UQ);
                uint64_t part = (uint32_t)_mm256_movemask_ps(differs);
#endif
                bits |= part << k;
            }
        else if (size == 2)
            for (int k = 0; k < 64; k += 32) {
                const uint16_t *from = (const uint16_t *)mask + place + i + k;
                __m256i zero = _mm256_setzero_si256(), magnitude = _mm256_set1_epi16(0x7FFF), zeros[2];
                for (int half = 0; half < 2; half++) {
                    __m256i v = _mm256_loadu_si256((const __m256i *)(from + 16 * half));
                    zeros[half] = _mm256_cmpeq_epi16(_mm256_and_si256(v, magnitude), zero);
                }
                /* Packed by halves of both, which are put in their order. */
                __m256i packed = _mm256_permute4x64_epi64(_mm256_packs_epi16(zeros[0], zeros[1]), 0xD8);
                bits |= (uint64_t)~(uint32_t)_mm256_movemask_epi8(packed) << k;
            }
        else
            for (int k = 0; k < 64; k += 32) {
                __m256i from = _mm256_loadu_si256((const __m256i *)((const uint8_t *)mask + place + i + k));
                uint32_t zeros = (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(from, _mm256_setzero_si256()));
                bits |= (uint64_t)~zeros << k;
            }
        memcpy(to + i / 8, &bits, 8);
    }
#endif
    for (; i + 8 <= columns; i += 8) to[i / 8] = byte_of(mask, size, place + i, 8);
    if (i < columns) to[i / 8] = byte_of(mask, size, place + i, (int)(columns - i));
}

static void pack_mask_rows(
    const void *mask, int size, int64_t begin, int64_t end, int64_t columns, const int64_t *index, uint8_t *bits) {
    int64_t bytes = (columns + 7) / 8;
    for (int64_t row = begin; row < end; row++) {
        int64_t place = (index ? index[row] : row) * columns;
        if (size == 4) pack_mask_row(mask, 4, place, columns, bits + row * bytes);
        else if (size == 2) pack_mask_row(mask, 2, place, columns, bits + row * bytes);
        else pack_mask_row(mask, 1, place, columns, bits + row * bytes);
    }
}

static void apply_mask_rows(
    const void *y, int type, const uint8_t *bits, int64_t begin, int64_t end, int64_t columns, const int64_t *index,
    float scale, void *out) {
    int64_t bytes = (columns + 7) / 8;
    for (int64_t row = begin; row < end; row++) {
        int64_t place = (index ? index[row] : row) * columns, i = 0;
        const uint8_t *from = bits + row * bytes;
#if LANES == 16
        __m512 factor = _mm512_set1_ps(scale);
        for (; i + 16 <= columns; i += 16) {
            uint16_t kept;
            memcpy(&kept, from + i / 8, 2);
            lanes v = load_elements(y, type, place + i), factors = (lanes)_mm512_maskz_mov_ps(kept, factor);
            store_elements(out, type, place + i, v * factors);
        }
#elif LANES == 8
        const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        for (; i + 8 <= columns; i += 8) {
            __m256i kept = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(from[i / 8]), bit), bit);
            lanes v = load_elements(y, type, place + i);
            lanes factors = (lanes)_mm256_and_ps(_mm256_castsi256_ps(kept), _mm256_set1_ps(scale));
            store_elements(out, type, place + i, v * factors);
        }
#endif
        for (; i < columns; i++)
            store_element(
                out, type, place + i, element(y, type, place + i) * (from[i / 8] >> i % 8 & 1 ? scale : 0.0f));
    }
}

/* mask: contiguous, of float32 (size 4), a half type (size 2) or bytes (size 1). index: `rows` rows of it, or null.
 * bits: contiguous. */
void V(rmm_pack_mask)(
    const void *mask, int size, int64_t rows, int64_t columns, const int64_t *index, uint8_t *bits, int threads) {
#pragma omp parallel num_threads(threads)
    pack_mask_rows(mask, size, SHARE(rows), columns, index, bits);
}

/* y, out: contiguous, of a type. Rows of `out` that are not in `index` are left as they are. */
void V(rmm_apply_mask)(
    const void *y, int type, const uint8_t *bits, int64_t rows, int64_t columns, const int64_t *index, float scale,
    void *out, int threads) {
#pragma omp parallel num_threads(threads)
    {
        /* The type is a constant in each call, so that the compiler specializes it. */
        if (type == FLOAT32) apply_mask_rows(y, FLOAT32, bits, SHARE(rows), columns, index, scale, out);
        else if (type == BFLOAT16) apply_mask_rows(y, BFLOAT16, bits, SHARE(rows), columns, index, scale, out);
        else apply_mask_rows(y, FLOAT16, bits, SHARE(rows), columns, index, scale, out);
    }
}
