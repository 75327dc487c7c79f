/* Derivatives of pointwise functions in few bits: rmm_linear/packing/derivatives.py in compiled form. */
#include <stdint.h>
#include <string.h>

#include "packing.h"
#include "variants.h"

/* g', in steps above its low end: linear between `count` knots, the first at `begin`, `density` of them per unit of x.
 * `below` up to `begin` (and for NaN), `above` from `end` on. */
typedef struct {
    const float *knots;
    float last, begin, density, end, below, above;
} table;

/* The function whose codes are one exact bit. */
enum { TABLE, RELU, LEAKY_RELU };

#define INLINE static inline __attribute__((always_inline))

/* The first and the second of every two lanes of a and b, one after the other. */
#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)

/* Joins the codes of a group: byte i of the h bytes holds the codes i, i + h, …, lower bits first. A whole group is
 * handled in words of 8 bytes: a code has room in its byte, so shifts do not reach the next one. */
INLINE void join(const uint8_t *q, int size, int bits, uint8_t *to) {
    int h = (size * bits + 7) / 8;
    if (size == GROUP) {
        uint64_t codes[8];
        memcpy(codes, q, GROUP);
        for (int word = 0; word < bits; word++) {
            uint64_t joined = 0;
            for (int j = 0; j < 8 / bits; j++) joined |= codes[j * bits + word] << j * bits;
            memcpy(to + 8 * word, &joined, 8);
        }
    } else {
        for (int i = 0; i < h; i++) to[i] = 0;
        for (int i = 0; i < size; i++) to[i % h] |= (uint8_t)(q[i] << i / h * bits);
    }
}

/* The reverse of join. */
INLINE void split(const uint8_t *from, int size, int bits, uint8_t *q) {
    int h = (size * bits + 7) / 8, mask = (1 << bits) - 1;
    if (size == GROUP && bits >= 4)
        for (int j = 0; j < 8 / bits; j++)
            for (int i = 0; i < 8 * bits; i++) q[j * 8 * bits + i] = from[i] >> j * bits & mask;
    else if (size == GROUP) {
        uint64_t codes[8];
        for (int word = 0; word < bits; word++) {
            uint64_t joined;
            memcpy(&joined, from + 8 * word, 8);
            for (int j = 0; j < 8 / bits; j++)
                codes[j * bits + word] = joined >> j * bits & mask * UINT64_C(0x0101010101010101);
        }
        memcpy(q, codes, GROUP);
    } else
        for (int i = 0; i < size; i++) q[i] = from[i % h] >> i / h * bits & mask;
}

/* The codes of 64 elements. */
INLINE void find_codes(const float *x, const table *t, int32_t a, const int32_t *c, uint8_t *q) {
    lanes place[PARTS];
    int32_t knot[GROUP];
    float pair[2 * GROUP]; /* the knots on both sides of every element, copied as one number of 64 bits */
    for (int k = 0; k < PARTS; k++) {
        lanes at = (LOAD(x + k * LANES) - t->begin) * t->density, zero = {0}, last = zero + t->last;
        at = PICK(at > zero, at, zero); /* NaN too */
        at = PICK(at < last, at, last);
        ints number = __builtin_convertvector(at, ints);
        *(stored_ints *)(knot + k * LANES) = number;
        place[k] = at - __builtin_convertvector(number, lanes);
    }
    for (int i = 0; i < GROUP; i++) {
        uint64_t both;
        memcpy(&both, t->knots + knot[i], 8);
        memcpy(pair + 2 * i, &both, 8);
    }
    for (int k = 0; k < PARTS; k++) {
        lanes v = LOAD(x + k * LANES), zero = {0};
        lanes first = LOAD(pair + 2 * k * LANES), second = LOAD(pair + (2 * k + 1) * LANES);
        lanes left = EVEN(first, second), steps = left + place[k] * (ODD(first, second) - left);
        steps = PICK(v > zero + t->begin, steps, zero + t->below);
        steps = PICK(v >= zero + t->end, zero + t->above, steps);
        lanes noise = (lanes)(*(const stored_ints *)(c + k * LANES) ^ a); /* 1 + u */
        ints code = __builtin_convertvector(steps + noise, ints) - 1;
        *(stored_bytes *)(q + k * LANES) = __builtin_convertvector(code, bytes);
    }
}

INLINE void code_group(
    const float *x, int size, int kind, int bits, const table *t, int32_t a, const int32_t *c, uint8_t *to) {
    uint8_t q[GROUP];
    if (kind == RELU)
        for (int i = 0; i < size; i++) q[i] = !(x[i] <= 0);
    else if (kind == LEAKY_RELU)
        for (int i = 0; i < size; i++) q[i] = x[i] > 0;
    else if (size == GROUP) find_codes(x, t, a, c, q);
    else {
        float padded[GROUP] = {0};
        int32_t words[GROUP] = {0};
        memcpy(padded, x, size * sizeof(float));
        memcpy(words, c, size * sizeof(int32_t));
        find_codes(padded, t, a, words, q);
    }
    join(q, size, bits, to);
}

/* Some elements of a matrix of float32, or of bfloat16 (size 2): in place, or widened in `buffer`. */
INLINE const float *elements(const void *m, int size, int64_t at, int count, float *buffer) {
    if (size == 4) return (const float *)m + at;
    const uint16_t *from = (const uint16_t *)m + at;
    for (int i = 0; i < count; i++) buffer[i] = from_bfloat16(from[i]);
    return buffer;
}

/* Rounds to bfloat16, ties to even, as PyTorch does. */
INLINE void narrow(const float *restrict from, int count, uint16_t *restrict to) {
    for (int i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, from + i, 4);
        int is_nan = (int32_t)(bits & 0x7FFFFFFF) > 0x7F800000;
        to[i] = is_nan ? 0x7FC0 : (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
}

INLINE void pack_row(
    const void *x, int size, int64_t place, int64_t columns, int kind, int bits, const table *t, int32_t a,
    const int32_t *c, uint8_t *to) {
    float buffer[GROUP];
    int64_t at = 0;
    for (; at + GROUP <= columns; at += GROUP)
        code_group(elements(x, size, place + at, GROUP, buffer), GROUP, kind, bits, t, a, c + at, to + at / 8 * bits);
    int left = (int)(columns - at);
    if (left)
        code_group(elements(x, size, place + at, left, buffer), left, kind, bits, t, a, c + at, to + at / 8 * bits);
}

VARIANTS static void pack_rows(
    const void *x, int size, int64_t stride, int64_t begin, int64_t end, int64_t columns, const int64_t *index, int kind,
    int bits, const table *t, const int32_t *a, const int32_t *c, uint8_t *codes) {
    int64_t length = (columns * bits + 7) / 8;
    for (int64_t row = begin; row < end; row++) {
        int64_t from = (index ? index[row] : row) * stride;
        uint8_t *to = codes + row * length;
        /* kind and bits are constants in each call, so that the compiler specializes it. */
        if (kind == RELU) pack_row(x, size, from, columns, RELU, 1, t, 0, c, to);
        else if (kind == LEAKY_RELU) pack_row(x, size, from, columns, LEAKY_RELU, 1, t, 0, c, to);
        else if (bits == 4) pack_row(x, size, from, columns, TABLE, 4, t, a[row], c, to);
        else if (bits == 2) pack_row(x, size, from, columns, TABLE, 2, t, a[row], c, to);
        else if (bits == 1) pack_row(x, size, from, columns, TABLE, 1, t, a[row], c, to);
        else pack_row(x, size, from, columns, TABLE, 8, t, a[row], c, to);
    }
}

/* base: the factor of dY for code 0, plus 3/2 of a step: a code is too low by ½, and the noise is 1 + u. */
INLINE void apply_group(
    const float *y, int size, int bits, const uint8_t *from, float base, float step, int32_t a, const int32_t *c,
    float *out) {
    uint8_t q[GROUP];
    split(from, size, bits, q);
    for (int i = 0; i < size; i++) {
        int32_t word = c[i] ^ a;
        float noise; /* 1 + u */
        memcpy(&noise, &word, 4);
        out[i] = y[i] * (base + step * ((float)q[i] - noise));
    }
}

/* dY where the bit is set; elsewhere 0, or the slope times dY. */
INLINE void apply_exact_group(const float *y, int size, const uint8_t *from, int kind, float slope, float *out) {
    uint8_t q[GROUP];
    split(from, size, 1, q);
    if (kind == RELU)
        for (int i = 0; i < size; i++) out[i] = q[i] ? y[i] : 0;
    else
        for (int i = 0; i < size; i++) out[i] = y[i] * (q[i] ? 1 : slope);
}

INLINE void apply_row(
    const void *y, int size, int64_t place, int64_t columns, int kind, int bits, const uint8_t *from, float low,
    float step, int32_t a, const int32_t *c, void *out) {
    float buffer[GROUP], made[GROUP];
    for (int64_t at = 0; at < columns; at += GROUP) {
        int count = columns - at < GROUP ? (int)(columns - at) : GROUP;
        const float *dy = elements(y, size, place + at, count, buffer);
        const uint8_t *codes = from + at / 8 * bits;
        float *to = size == 4 ? (float *)out + place + at : made;
        /* 64 is a constant in its own calls, so that the compiler vectorizes them. */
        if (kind == TABLE && count == GROUP) apply_group(dy, GROUP, bits, codes, low + 1.5f * step, step, a, c + at, to);
        else if (kind == TABLE) apply_group(dy, count, bits, codes, low + 1.5f * step, step, a, c + at, to);
        else if (count == GROUP) apply_exact_group(dy, GROUP, codes, kind, low, to);
        else apply_exact_group(dy, count, codes, kind, low, to);
        if (size != 4) narrow(made, count, (uint16_t *)out + place + at);
    }
}

VARIANTS static void apply_rows(
    const void *y, int size, const uint8_t *codes, int64_t begin, int64_t end, int64_t columns, const int64_t *index,
    int kind, int bits, float low, float step, const int32_t *a, const int32_t *c, void *out) {
    int64_t length = (columns * bits + 7) / 8;
    for (int64_t row = begin; row < end; row++) {
        int64_t at = (index ? index[row] : row) * columns;
        const uint8_t *from = codes + row * length;
        if (kind == RELU) apply_row(y, size, at, columns, RELU, 1, from, 0, 0, 0, c, out);
        else if (kind == LEAKY_RELU) apply_row(y, size, at, columns, LEAKY_RELU, 1, from, low, 0, 0, c, out);
        else if (bits == 4) apply_row(y, size, at, columns, TABLE, 4, from, low, step, a[row], c, out);
        else if (bits == 2) apply_row(y, size, at, columns, TABLE, 2, from, low, step, a[row], c, out);
        else if (bits == 1) apply_row(y, size, at, columns, TABLE, 1, from, low, step, a[row], c, out);
        else apply_row(y, size, at, columns, TABLE, 8, from, low, step, a[row], c, out);
    }
}

/* x: float32 (size 4) or bfloat16 (size 2), `stride` elements from one row to the next. index: `rows` rows of it, or
 * null. knots: `count`. a: rows. c: columns. codes: contiguous. Without a table (kind RELU or LEAKY_RELU) knots, a and c
 * may be null. */
void rmm_pack_derivative(
    const void *x, int size, int64_t stride, int64_t rows, int64_t columns, const int64_t *index, int kind, int bits,
    const float *knots, int64_t count, float begin, float density, float end, float below, float above,
    const int32_t *a, const int32_t *c, uint8_t *codes, int threads) {
    table t = {knots, (float)(count - 1) * (1 - 0x1p-22f), begin, density, end, below, above};
#pragma omp parallel num_threads(threads)
    pack_rows(x, size, stride, SHARE(rows), columns, index, kind, bits, &t, a, c, codes);
}

/* y, out: float32 (size 4) or bfloat16 (size 2), contiguous, as codes. low: the slope if kind is LEAKY_RELU. Rows of
 * `out` that are not in `index` are left as they are. */
void rmm_apply_derivative(
    const void *y, int size, const uint8_t *codes, int64_t rows, int64_t columns, const int64_t *index, int kind,
    int bits, float low, float step, const int32_t *a, const int32_t *c, void *out, int threads) {
#pragma omp parallel num_threads(threads)
    apply_rows(y, size, codes, SHARE(rows), columns, index, kind, bits, low, step, a, c, out);
}
