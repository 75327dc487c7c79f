/* Packing of float32 rows into 8, 4 or 2 bits, and back: rmm_linear/packing.py in compiled form.
 *
 * Every number is that of the plain version but for the last bit of the turn, whose sums are made in another order.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "countsketch.h"
#include "variants.h"

#define GROUP 64
#define LANES 8

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));

typedef int32_t ints __attribute__((vector_size(LANES * sizeof(int32_t))));

/* The lanes i ^ 1, i ^ 2 and i ^ 4 of v. */
#define SWAP_1(v) __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6)
#define SWAP_2(v) __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5)
#define SWAP_4(v) __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3)

static const lanes SIGN_1 = {1, -1, 1, -1, 1, -1, 1, -1};
static const lanes SIGN_2 = {1, 1, -1, -1, 1, 1, -1, -1};
static const lanes SIGN_4 = {1, 1, 1, 1, -1, -1, -1, -1};

#define PICK(mask, a, b) ((lanes)(((ints)(a) & (mask)) | ((ints)(b) & ~(mask))))
#define MIN(a, b) PICK((a) < (b), a, b)
#define MAX(a, b) PICK((a) > (b), a, b)

/* t becomes H (t · before) · after, H being the orthonormal Hadamard matrix. */
static inline __attribute__((always_inline)) void turn(float *t, const float *before, const float *after) {
    lanes v[GROUP / LANES], s;
    for (int k = 0; k < GROUP / LANES; k++) {
        memcpy(&v[k], t + k * LANES, sizeof(lanes));
        if (before) memcpy(&s, before + k * LANES, sizeof(lanes)), v[k] *= s;
        v[k] = SWAP_1(v[k]) + v[k] * SIGN_1;
        v[k] = SWAP_2(v[k]) + v[k] * SIGN_2;
        v[k] = SWAP_4(v[k]) + v[k] * SIGN_4;
    }
    for (int h = 1; h < GROUP / LANES; h *= 2)
        for (int k = 0; k < GROUP / LANES; k++)
            if (!(k & h)) {
                lanes sum = v[k] + v[k + h];
                v[k + h] = v[k] - v[k + h], v[k] = sum;
            }
    for (int k = 0; k < GROUP / LANES; k++) {
        v[k] *= 0.125f;
        if (after) memcpy(&s, after + k * LANES, sizeof(lanes)), v[k] *= s;
    }
    memcpy(t, v, sizeof(v));
}

/* The largest bfloat16 number that is not above a float32 number. */
static inline float round_down(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    bits = (int32_t)((uint32_t)bits + ((bits >> 31) & 0xFFFF)) & ~0xFFFF;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint16_t bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return (uint16_t)(bits >> 16);
}

static inline float from_bfloat16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

static inline __attribute__((always_inline)) void pack_group(
    float *t, int size, int bits, int32_t a, const int32_t *c, uint8_t *codes, uint16_t *range) {
    lanes v[GROUP / LANES];
    memcpy(v, t, sizeof(v));
    lanes low = v[0], high = v[0], odd = v[0] * 0.0f; /* NaN for a NaN and for an infinity */
    for (int k = 1; k < GROUP / LANES; k++) low = MIN(v[k], low), high = MAX(v[k], high), odd += v[k] * 0.0f;
    low = MIN(low, SWAP_4(low)), high = MAX(high, SWAP_4(high)), odd += SWAP_4(odd);
    low = MIN(low, SWAP_2(low)), high = MAX(high, SWAP_2(high)), odd += SWAP_2(odd);
    low = MIN(low, SWAP_1(low)), high = MAX(high, SWAP_1(high)), odd += SWAP_1(odd);
    float offset = round_down(low[0] + odd[0]);
    float share = (float)((1 + 0x1p-18) / ((1 << bits) - 1));
    float scale = -round_down((offset - high[0]) * share);
    range[0] = bfloat16(offset), range[1] = bfloat16(scale);
    float inverse = scale < 0x1p-126f ? 0 : 1 / scale;
    int32_t code[GROUP];
    for (int i = 0; i < GROUP; i++) {
        int32_t word = a ^ c[i];
        float chance;
        memcpy(&chance, &word, 4);
        float above = (t[i] - offset) * inverse + chance;
        code[i] = (int32_t)(above >= 1 ? above : 1) - 1; /* 0 for NaN */
    }
    if (size == GROUP && bits == 4) {
        for (int i = 0; i < 32; i++) codes[i] = (uint8_t)(code[i] | code[i + 32] << 4);
    } else if (size == GROUP && bits == 2) {
        for (int i = 0; i < 16; i++)
            codes[i] = (uint8_t)(code[i] | code[i + 16] << 2 | code[i + 32] << 4 | code[i + 48] << 6);
    } else if (size == GROUP) {
        for (int i = 0; i < 64; i++) codes[i] = (uint8_t)code[i];
    } else {
        int bytes = (size * bits + 7) / 8;
        memset(codes, 0, bytes);
        for (int i = 0; i < size; i++) codes[i % bytes] |= (uint8_t)((code[i] & ((1 << bits) - 1)) << i / bytes * bits);
    }
}

VARIANTS static void pack_rows(
    const hashed *m, float *room, int64_t begin, int64_t end, int bits, const float *signs, const int32_t *a,
    const int32_t *c, uint8_t *codes, uint16_t *ranges) {
    int64_t columns = m->columns, groups = (columns + GROUP - 1) / GROUP, bytes = (columns * bits + 7) / 8;
    for (int64_t row = begin; row < end; row++) {
        const float *z = hashed_row(m, row, room);
        for (int64_t group = 0; group < groups; group++) {
            float t[GROUP];
            int32_t chance[GROUP];
            int size = columns - group * GROUP < GROUP ? (int)(columns - group * GROUP) : GROUP;
            const float *from = z + group * GROUP;
            uint8_t *to = codes + row * bytes + group * 8 * bits;
            uint16_t *range = ranges + (row * groups + group) * 2;
            if (size == GROUP) {
                memcpy(t, from, sizeof(t));
                turn(t, signs, 0);
                pack_group(t, GROUP, bits, a[row], c + group * GROUP, to, range);
            } else {
                for (int i = 0; i < GROUP; i++) { /* the last element again changes no range */
                    int place = i < size ? i : size - 1;
                    t[i] = from[place];
                    chance[i] = c[group * GROUP + place];
                }
                pack_group(t, size, bits, a[row], chance, to, range);
            }
        }
    }
}

VARIANTS static void unpack_rows(
    const uint8_t *codes, const uint16_t *ranges, int64_t begin, int64_t end, int64_t columns, int bits, float *z) {
    int64_t groups = (columns + GROUP - 1) / GROUP, bytes = (columns * bits + 7) / 8;
    for (int64_t row = begin; row < end; row++)
        for (int64_t group = 0; group < groups; group++) {
            int size = columns - group * GROUP < GROUP ? (int)(columns - group * GROUP) : GROUP;
            int h = (size * bits + 7) / 8, mask = (1 << bits) - 1;
            const uint8_t *from = codes + row * bytes + group * 8 * bits;
            const uint16_t *range = ranges + (row * groups + group) * 2;
            float *to = z + row * columns + group * GROUP;
            float offset = from_bfloat16(range[0]), scale = from_bfloat16(range[1]);
            if (size == GROUP && bits == 4) {
                for (int i = 0; i < 32; i++) to[i] = (float)(from[i] & 15) * scale + offset;
                for (int i = 0; i < 32; i++) to[i + 32] = (float)(from[i] >> 4) * scale + offset;
            } else if (size == GROUP && bits == 8) {
                for (int i = 0; i < 64; i++) to[i] = (float)from[i] * scale + offset;
            } else {
                for (int i = 0; i < size; i++) to[i] = (float)(from[i % h] >> i / h * bits & mask) * scale + offset;
            }
        }
}

VARIANTS static void turn_rows_back(float *m, int64_t begin, int64_t end, int64_t columns, const float *signs) {
    for (int64_t row = begin; row < end; row++)
        for (int64_t group = 0; group < columns / GROUP; group++) turn(m + row * columns + group * GROUP, 0, signs);
}

/* m: what is packed, as it is or hashed to `rows` rows. signs: 64, of the turn. a: rows. c: columns. codes, ranges:
 * contiguous. Returns 0, or 1 where there was no memory. */
int rmm_pack(
    const float *m, int64_t tokens, int64_t columns, int64_t stride, int64_t rows, int64_t segments,
    const int64_t *shifts, const int8_t *token_signs, int bits, const float *signs, const int32_t *a, const int32_t *c,
    uint8_t *codes, uint16_t *ranges, int threads) {
    hashed source = {m, tokens, columns, stride, rows, segments, shifts, token_signs};
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *room = segments > 1 ? malloc(columns * sizeof(float) + 1) : 0;
        if (segments > 1 && !room) failed = 1;
        else pack_rows(&source, room, SHARE(rows), bits, signs, a, c, codes, ranges);
        free(room);
    }
    return failed;
}

/* codes, ranges: contiguous. z: contiguous; its whole groups stay turned. */
void rmm_unpack(
    const uint8_t *codes, const uint16_t *ranges, int64_t rows, int64_t columns, int bits, float *z, int threads) {
#pragma omp parallel num_threads(threads)
    unpack_rows(codes, ranges, SHARE(rows), columns, bits, z);
}

/* m: contiguous, turned back in place. signs: 64. */
void rmm_turn_back(float *m, int64_t rows, int64_t columns, const float *signs, int threads) {
#pragma omp parallel num_threads(threads)
    turn_rows_back(m, SHARE(rows), columns, signs);
}
