/* Packing of float32 rows into 8, 4 or 2 bits, and back: rmm_linear/packing/ in compiled form.
 *
 * Results equal those of plain PyTorch but for the last bits of the rotation, whose sums are made in another order.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "countsketch.h"
#include "variants.h"

#define GROUP 64
#define LANES 16
#define PARTS (GROUP / LANES)

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef float stored_lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * sizeof(int32_t))));
typedef int32_t stored_ints __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4), may_alias));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef uint8_t stored_bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#define LOAD(pointer) (*(const stored_lanes *)(pointer))
#define STORE(pointer, v) (*(stored_lanes *)(pointer) = (v))

/* The lanes i ^ 1, i ^ 2, i ^ 4 and i ^ 8 of v. */
#define SWAP_1(v) __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14)
#define SWAP_2(v) __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13)
#define SWAP_4(v) __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11)
#define SWAP_8(v) __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)

static const lanes SIGN_1 = {1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1, 1, -1};
static const lanes SIGN_2 = {1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1, 1, 1, -1, -1};
static const lanes SIGN_4 = {1, 1, 1, 1, -1, -1, -1, -1, 1, 1, 1, 1, -1, -1, -1, -1};
static const lanes SIGN_8 = {1, 1, 1, 1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1, -1};

#define PICK(mask, a, b) ((lanes)(((ints)(a) & (mask)) | ((ints)(b) & ~(mask))))
#define MIN(a, b) PICK((a) < (b), a, b)
#define MAX(a, b) PICK((a) > (b), a, b)

/* Replaces v by H v, with the orthonormal Hadamard matrix H. */
static inline __attribute__((always_inline)) void rotate(lanes v[PARTS]) {
    for (int k = 0; k < PARTS; k++) {
        v[k] = SWAP_1(v[k]) + v[k] * SIGN_1;
        v[k] = SWAP_2(v[k]) + v[k] * SIGN_2;
        v[k] = SWAP_4(v[k]) + v[k] * SIGN_4;
        v[k] = SWAP_8(v[k]) + v[k] * SIGN_8;
    }
    for (int h = 1; h < PARTS; h *= 2)
        for (int k = 0; k < PARTS; k++)
            if (!(k & h)) {
                lanes sum = v[k] + v[k + h];
                v[k + h] = v[k] - v[k + h], v[k] = sum;
            }
    for (int k = 0; k < PARTS; k++) v[k] *= 0.125f;
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

/* Writes offset and scale of a group to `qparams`, 1 / scale to `inverse`, and sets `not_finite` if they are not finite.
 * Returns the offset. */
static inline __attribute__((always_inline)) float find_qparams(
    const lanes v[PARTS], int bits, uint16_t *qparams, float *inverse, int *not_finite) {
    lanes low = v[0], high = v[0], nan = v[0] * 0.0f; /* NaN for a NaN and for an infinity */
    for (int k = 1; k < PARTS; k++) low = MIN(v[k], low), high = MAX(v[k], high), nan += v[k] * 0.0f;
    low = MIN(low, SWAP_8(low)), high = MAX(high, SWAP_8(high)), nan += SWAP_8(nan);
    low = MIN(low, SWAP_4(low)), high = MAX(high, SWAP_4(high)), nan += SWAP_4(nan);
    low = MIN(low, SWAP_2(low)), high = MAX(high, SWAP_2(high)), nan += SWAP_2(nan);
    low = MIN(low, SWAP_1(low)), high = MAX(high, SWAP_1(high)), nan += SWAP_1(nan);
    float offset = round_down(low[0] + nan[0]);
    float share = (float)((1 + 0x1p-18) / ((1 << bits) - 1));
    float scale = -round_down((offset - high[0]) * share);
    qparams[0] = bfloat16(offset), qparams[1] = bfloat16(scale);
    *inverse = scale < 0x1p-126f ? 0 : 1 / scale;
    *not_finite |= !(scale * 0.0f == 0);
    return offset;
}

/* Codes of a part: (v - offset) / scale plus a random number in [1, 2), truncated, minus 1; 0 for NaN. */
static inline __attribute__((always_inline)) ints round_part(lanes v, float offset, float inverse, ints chance) {
    lanes above = (v - offset) * inverse + (lanes)chance, one = {0};
    one += 1.0f;
    return __builtin_convertvector(PICK(above >= one, above, one), ints) - 1;
}

static inline __attribute__((always_inline)) void pack_group(
    const lanes v[PARTS], int bits, int32_t a, const int32_t *c, uint8_t *codes, uint16_t *qparams, int *not_finite) {
    float inverse, offset = find_qparams(v, bits, qparams, &inverse, not_finite);
    ints code[PARTS];
    for (int k = 0; k < PARTS; k++)
        code[k] = round_part(v[k], offset, inverse, *(const stored_ints *)(c + k * LANES) ^ a);
    int joined = 8 / bits, places = PARTS / joined; /* byte i holds the elements i, i + 64 / joined, … */
    for (int k = 0; k < places; k++) {
        ints byte = code[k];
        for (int j = 1; j < joined; j++) byte |= code[k + j * places] << (j * bits);
        *(stored_bytes *)(codes + k * LANES) = __builtin_convertvector(byte, bytes);
    }
}

/* The last group, if it has fewer columns. It is filled up with its last element, which does not change the qparams. */
static void pack_short_group(
    const float *from, int size, int bits, int32_t a, const int32_t *c, uint8_t *codes, uint16_t *qparams,
    int *not_finite) {
    lanes v[PARTS];
    for (int i = 0; i < GROUP; i++) v[i / LANES][i % LANES] = from[i < size ? i : size - 1];
    float inverse, offset = find_qparams(v, bits, qparams, &inverse, not_finite);
    int length = (size * bits + 7) / 8;
    memset(codes, 0, length);
    for (int i = 0; i < size; i++) {
        int32_t word = a ^ c[i];
        float chance;
        memcpy(&chance, &word, 4);
        float above = (from[i] - offset) * inverse + chance;
        int32_t code = (int32_t)(above >= 1 ? above : 1) - 1;
        codes[i % length] |= (uint8_t)(code << i / length * bits);
    }
}

static inline __attribute__((always_inline)) void pack_whole_groups(
    const float *z, int64_t groups, int bits, const lanes signs[PARTS], int32_t a, const int32_t *c, uint8_t *codes,
    uint16_t *qparams, int *not_finite) {
    for (int64_t group = 0; group < groups; group++) {
        lanes v[PARTS];
        for (int k = 0; k < PARTS; k++) v[k] = LOAD(z + group * GROUP + k * LANES) * signs[k];
        rotate(v);
        pack_group(v, bits, a, c + group * GROUP, codes + group * 8 * bits, qparams + group * 2, not_finite);
    }
}

VARIANTS static int pack_rows(
    const hashed *m, float *buffer, int64_t begin, int64_t end, int bits, const float *signs, const int32_t *a,
    const int32_t *c, uint8_t *codes, uint16_t *qparams) {
    int64_t columns = m->columns, whole = columns / GROUP, groups = (columns + GROUP - 1) / GROUP;
    int64_t length = (columns * bits + 7) / 8;
    int not_finite = 0;
    lanes sign[PARTS];
    for (int k = 0; k < PARTS; k++) sign[k] = LOAD(signs + k * LANES);
    for (int64_t row = begin; row < end; row++) {
        const float *z = hashed_row(m, row, buffer);
        uint8_t *to = codes + row * length;
        uint16_t *row_qparams = qparams + row * groups * 2;
        /* bits is a constant in each call, so that the compiler specializes it. */
        if (bits == 4) pack_whole_groups(z, whole, 4, sign, a[row], c, to, row_qparams, &not_finite);
        else if (bits == 2) pack_whole_groups(z, whole, 2, sign, a[row], c, to, row_qparams, &not_finite);
        else pack_whole_groups(z, whole, 8, sign, a[row], c, to, row_qparams, &not_finite);
        if (whole < groups)
            pack_short_group(
                z + whole * GROUP, (int)(columns - whole * GROUP), bits, a[row], c + whole * GROUP,
                to + whole * 8 * bits, row_qparams + whole * 2, &not_finite);
    }
    return not_finite;
}

/* The element with a code; `word` holds the bits of 1 + u, u the number that was added before it was rounded. */
static inline __attribute__((always_inline)) float element(int code, int32_t word, float offset, float scale) {
    float chance;
    memcpy(&chance, &word, 4);
    return ((float)code - (chance - 1.5f)) * scale + offset;
}

VARIANTS static void unpack_rows(
    const uint8_t *codes, const uint16_t *qparams, int64_t begin, int64_t end, int64_t columns, int bits,
    const int32_t *a, const int32_t *c, float *z) {
    int64_t groups = (columns + GROUP - 1) / GROUP, bytes = (columns * bits + 7) / 8;
    for (int64_t row = begin; row < end; row++)
        for (int64_t group = 0; group < groups; group++) {
            int size = columns - group * GROUP < GROUP ? (int)(columns - group * GROUP) : GROUP;
            int h = (size * bits + 7) / 8, mask = (1 << bits) - 1;
            const uint8_t *from = codes + row * bytes + group * 8 * bits;
            const uint16_t *group_qparams = qparams + (row * groups + group) * 2;
            float *to = z + row * columns + group * GROUP;
            const int32_t *at = c + group * GROUP;
            int32_t ar = a[row];
            float offset = from_bfloat16(group_qparams[0]), scale = from_bfloat16(group_qparams[1]);
            if (size == GROUP && bits == 4) {
                for (int i = 0; i < 32; i++) to[i] = element(from[i] & 15, at[i] ^ ar, offset, scale);
                for (int i = 0; i < 32; i++) to[i + 32] = element(from[i] >> 4, at[i + 32] ^ ar, offset, scale);
            } else if (size == GROUP && bits == 2) {
                for (int j = 0; j < 4; j++)
                    for (int i = 16 * j; i < 16 * j + 16; i++)
                        to[i] = element(from[i - 16 * j] >> 2 * j & 3, at[i] ^ ar, offset, scale);
            } else if (size == GROUP && bits == 8) {
                for (int i = 0; i < 64; i++) to[i] = element(from[i], at[i] ^ ar, offset, scale);
            } else {
                for (int i = 0; i < size; i++)
                    to[i] = element(from[i % h] >> i / h * bits & mask, at[i] ^ ar, offset, scale);
            }
        }
}

VARIANTS static void unrotate_rows(float *m, int64_t begin, int64_t end, int64_t columns, const float *signs) {
    for (int64_t row = begin; row < end; row++)
        for (int64_t group = 0; group < columns / GROUP; group++) {
            float *place = m + row * columns + group * GROUP;
            lanes v[PARTS];
            for (int k = 0; k < PARTS; k++) v[k] = LOAD(place + k * LANES);
            rotate(v);
            for (int k = 0; k < PARTS; k++) STORE(place + k * LANES, v[k] * LOAD(signs + k * LANES));
        }
}

/* Packs m, or with several segments its CountSketch of `rows` rows. signs: 64, of the rotation. a: rows. c: columns.
 * codes, qparams: contiguous. Returns 0; 1 if qparams are not finite; 2 if memory could not be allocated. */
int rmm_pack(
    const float *m, int64_t tokens, int64_t columns, int64_t stride, int64_t rows, int64_t segments,
    const int64_t *shifts, const int8_t *token_signs, int bits, const float *signs, const int32_t *a, const int32_t *c,
    uint8_t *codes, uint16_t *qparams, int threads) {
    hashed source = {m, tokens, columns, stride, rows, segments, shifts, token_signs};
    int result = 0;
#pragma omp parallel num_threads(threads) reduction(| : result)
    {
        float *buffer = segments > 1 ? malloc(columns * sizeof(float) + 1) : 0;
        if (segments > 1 && !buffer) result = 2;
        else result = pack_rows(&source, buffer, SHARE(rows), bits, signs, a, c, codes, qparams);
        free(buffer);
    }
    return result;
}

/* codes, qparams: contiguous. a: rows. c: columns. z: contiguous; its whole groups stay rotated. */
void rmm_unpack(
    const uint8_t *codes, const uint16_t *qparams, int64_t rows, int64_t columns, int bits, const int32_t *a,
    const int32_t *c, float *z, int threads) {
#pragma omp parallel num_threads(threads)
    unpack_rows(codes, qparams, SHARE(rows), columns, bits, a, c, z);
}

/* m: contiguous, unrotated in place. signs: 64. */
void rmm_unrotate(float *m, int64_t rows, int64_t columns, const float *signs, int threads) {
#pragma omp parallel num_threads(threads)
    unrotate_rows(m, SHARE(rows), columns, signs);
}
