/* Groups of 64 columns: rotation, offset and scale, codes, and back: rmm_linear/packing/rounding.py in compiled form. */
#include <stdint.h>
#include <string.h>

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

/* The element with a code; `word` holds the bits of 1 + u, u the number that was added before it was rounded. */
static inline __attribute__((always_inline)) float element(int code, int32_t word, float offset, float scale) {
    float chance;
    memcpy(&chance, &word, 4);
    return ((float)code - (chance - 1.5f)) * scale + offset;
}

/* Writes the elements of a group of `size` columns, rotated. c: of these columns. */
static inline __attribute__((always_inline)) void unpack_group(
    const uint8_t *from, const uint16_t *qparams, int size, int bits, int32_t a, const int32_t *c, float *to) {
    float offset = from_bfloat16(qparams[0]), scale = from_bfloat16(qparams[1]);
    int h = (size * bits + 7) / 8, mask = (1 << bits) - 1;
    if (size == GROUP && bits == 4) {
        for (int i = 0; i < 32; i++) to[i] = element(from[i] & 15, c[i] ^ a, offset, scale);
        for (int i = 0; i < 32; i++) to[i + 32] = element(from[i] >> 4, c[i + 32] ^ a, offset, scale);
    } else if (size == GROUP && bits == 2) {
        for (int i = 0; i < 16; i++) to[i] = element(from[i] & 3, c[i] ^ a, offset, scale);
        for (int i = 0; i < 16; i++) to[i + 16] = element(from[i] >> 2 & 3, c[i + 16] ^ a, offset, scale);
        for (int i = 0; i < 16; i++) to[i + 32] = element(from[i] >> 4 & 3, c[i + 32] ^ a, offset, scale);
        for (int i = 0; i < 16; i++) to[i + 48] = element(from[i] >> 6, c[i + 48] ^ a, offset, scale);
    } else if (size == GROUP && bits == 8) {
        for (int i = 0; i < 64; i++) to[i] = element(from[i], c[i] ^ a, offset, scale);
    } else {
        for (int i = 0; i < size; i++) to[i] = element(from[i % h] >> i / h * bits & mask, c[i] ^ a, offset, scale);
    }
}
