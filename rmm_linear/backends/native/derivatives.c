/* Derivatives of pointwise functions in few bits: rmm_linear/packing/derivatives.py in compiled form. */
#include <stdint.h>
#include <string.h>

#include "variants.h"

#define GROUP 64

/* g', in steps above its low end: linear between `count` knots, the first at `begin`, `density` of them per unit of x.
 * `below` up to `begin` (and for NaN), `above` from `end` on. */
typedef struct {
    const float *knots;
    float last, begin, density, end, below, above;
} table;

/* The function whose codes are one exact bit. */
enum { TABLE, RELU, LEAKY_RELU };

#define INLINE static inline __attribute__((always_inline))
#define LANES 16

typedef float lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * sizeof(int32_t)), aligned(4), may_alias));
typedef uint8_t bytes __attribute__((vector_size(LANES), aligned(1), may_alias));

#define AT(type, pointer) (*(type *)(pointer))
#define PICK(mask, a, b) ((lanes)(((ints)(a) & (mask)) | ((ints)(b) & ~(mask))))

#define EVEN(a, b) __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30)
#define ODD(a, b) __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)

/* Joins the codes of a group: byte i of the h bytes holds the codes i, i + h, …, lower bits first. */
INLINE void join(const uint8_t *restrict q, int size, int bits, uint8_t *restrict to) {
    int h = (size * bits + 7) / 8;
    if (size < GROUP) {
        memset(to, 0, h);
        for (int i = 0; i < size; i++) to[i % h] |= (uint8_t)(q[i] << i / h * bits);
    } else if (bits == 4)
        for (int i = 0; i < 32; i++) to[i] = (uint8_t)(q[i] | q[i + 32] << 4);
    else if (bits == 2)
        for (int i = 0; i < 16; i++) to[i] = (uint8_t)(q[i] | q[i + 16] << 2 | q[i + 32] << 4 | q[i + 48] << 6);
    else if (bits == 1)
        for (int i = 0; i < 8; i++)
            to[i] = (uint8_t)(q[i] | q[i + 8] << 1 | q[i + 16] << 2 | q[i + 24] << 3 | q[i + 32] << 4 | q[i + 40] << 5 |
                              q[i + 48] << 6 | q[i + 56] << 7);
    else memcpy(to, q, GROUP);
}

/* The reverse of join. */
INLINE void split(const uint8_t *restrict from, int size, int bits, uint8_t *restrict q) {
    int h = (size * bits + 7) / 8, mask = (1 << bits) - 1;
    if (size < GROUP)
        for (int i = 0; i < size; i++) q[i] = from[i % h] >> i / h * bits & mask;
    else
        for (int j = 0; j < 8 / bits; j++)
            for (int i = 0; i < 8 * bits; i++) q[j * 8 * bits + i] = from[i] >> j * bits & mask;
}

/* The codes of 64 elements. */
INLINE void find_codes(const float *x, const table *t, int32_t a, const int32_t *c, uint8_t *q) {
    lanes place[GROUP / LANES];
    int32_t knot[GROUP];
    float pair[2 * GROUP]; /* the knots on both sides of every element, copied as one number of 64 bits */
    for (int k = 0; k < GROUP / LANES; k++) {
        lanes at = (AT(const lanes, x + k * LANES) - t->begin) * t->density, zero = {0}, last = zero + t->last;
        at = PICK(at > zero, at, zero); /* NaN too */
        at = PICK(at < last, at, last);
        ints number = __builtin_convertvector(at, ints);
        AT(ints, knot + k * LANES) = number;
        place[k] = at - __builtin_convertvector(number, lanes);
    }
    for (int i = 0; i < GROUP; i++) {
        uint64_t both;
        memcpy(&both, t->knots + knot[i], 8);
        memcpy(pair + 2 * i, &both, 8);
    }
    for (int k = 0; k < GROUP / LANES; k++) {
        lanes v = AT(const lanes, x + k * LANES), zero = {0};
        lanes first = AT(lanes, pair + 2 * k * LANES), second = AT(lanes, pair + (2 * k + 1) * LANES);
        lanes left = EVEN(first, second), steps = left + place[k] * (ODD(first, second) - left);
        steps = PICK(v > zero + t->begin, steps, zero + t->below);
        steps = PICK(v >= zero + t->end, zero + t->above, steps);
        lanes noise = (lanes)(AT(const ints, c + k * LANES) ^ a); /* 1 + u */
        AT(bytes, q + k * LANES) = __builtin_convertvector(__builtin_convertvector(steps + noise, ints) - 1, bytes);
    }
}

INLINE void pack_group(
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

INLINE void pack_row(
    const float *x, int64_t columns, int kind, int bits, const table *t, int32_t a, const int32_t *c, uint8_t *to) {
    int64_t whole = columns / GROUP, left = columns % GROUP;
    for (int64_t group = 0; group < whole; group++)
        pack_group(x + group * GROUP, GROUP, kind, bits, t, a, c + group * GROUP, to + group * 8 * bits);
    if (left)
        pack_group(x + whole * GROUP, (int)left, kind, bits, t, a, c + whole * GROUP, to + whole * 8 * bits);
}

VARIANTS static void pack_rows(
    const float *x, int64_t stride, int64_t begin, int64_t end, int64_t columns, const int64_t *index, int kind, int bits,
    const table *t, const int32_t *a, const int32_t *c, uint8_t *codes) {
    int64_t length = (columns * bits + 7) / 8;
    for (int64_t row = begin; row < end; row++) {
        const float *from = x + (index ? index[row] : row) * stride;
        uint8_t *to = codes + row * length;
        /* kind and bits are constants in each call, so that the compiler specializes it. */
        if (kind == RELU) pack_row(from, columns, RELU, 1, t, 0, c, to);
        else if (kind == LEAKY_RELU) pack_row(from, columns, LEAKY_RELU, 1, t, 0, c, to);
        else if (bits == 4) pack_row(from, columns, TABLE, 4, t, a[row], c, to);
        else if (bits == 2) pack_row(from, columns, TABLE, 2, t, a[row], c, to);
        else if (bits == 1) pack_row(from, columns, TABLE, 1, t, a[row], c, to);
        else pack_row(from, columns, TABLE, 8, t, a[row], c, to);
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

INLINE void apply_row(
    const float *y, int64_t columns, int bits, const uint8_t *from, float low, float step, int32_t a, const int32_t *c,
    float *out) {
    int64_t whole = columns / GROUP, left = columns % GROUP;
    for (int64_t group = 0; group < whole; group++) {
        int64_t at = group * GROUP;
        apply_group(y + at, GROUP, bits, from + group * 8 * bits, low, step, a, c + at, out + at);
    }
    if (left) {
        int64_t at = whole * GROUP;
        apply_group(y + at, (int)left, bits, from + whole * 8 * bits, low, step, a, c + at, out + at);
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

INLINE void apply_exact_row(
    const float *y, int64_t columns, const uint8_t *from, int kind, float slope, float *out) {
    int64_t at = 0;
    for (; at + GROUP <= columns; at += GROUP) apply_exact_group(y + at, GROUP, from + at / 8, kind, slope, out + at);
    if (at < columns) apply_exact_group(y + at, (int)(columns - at), from + at / 8, kind, slope, out + at);
}

VARIANTS static void apply_rows(
    const float *y, const uint8_t *codes, int64_t begin, int64_t end, int64_t columns, const int64_t *index, int kind,
    int bits, float low, float step, const int32_t *a, const int32_t *c, float *out) {
    int64_t length = (columns * bits + 7) / 8;
    float base = low + 1.5f * step;
    for (int64_t row = begin; row < end; row++) {
        int64_t place = (index ? index[row] : row) * columns;
        const float *dy = y + place;
        const uint8_t *from = codes + row * length;
        float *to = out + place;
        if (kind == RELU) apply_exact_row(dy, columns, from, RELU, 0, to);
        else if (kind == LEAKY_RELU) apply_exact_row(dy, columns, from, LEAKY_RELU, low, to);
        else if (bits == 4) apply_row(dy, columns, 4, from, base, step, a[row], c, to);
        else if (bits == 2) apply_row(dy, columns, 2, from, base, step, a[row], c, to);
        else if (bits == 1) apply_row(dy, columns, 1, from, base, step, a[row], c, to);
        else apply_row(dy, columns, 8, from, base, step, a[row], c, to);
    }
}

/* x: `stride` elements from one row to the next. index: `rows` rows of it, or null. knots: `count`. a: rows. c: columns.
 * codes: contiguous. Without a table (kind RELU or LEAKY_RELU) knots, a and c may be null. */
void rmm_pack_derivative(
    const float *x, int64_t stride, int64_t rows, int64_t columns, const int64_t *index, int kind, int bits,
    const float *knots, int64_t count, float begin, float density, float end, float below, float above,
    const int32_t *a, const int32_t *c, uint8_t *codes, int threads) {
    table t = {knots, (float)(count - 1) * (1 - 0x1p-22f), begin, density, end, below, above};
#pragma omp parallel num_threads(threads)
    pack_rows(x, stride, SHARE(rows), columns, index, kind, bits, &t, a, c, codes);
}

/* y, codes, out: contiguous. low: the slope if kind is LEAKY_RELU. Rows of `out` not in `index` are left as they are. */
void rmm_apply_derivative(
    const float *y, const uint8_t *codes, int64_t rows, int64_t columns, const int64_t *index, int kind, int bits,
    float low, float step, const int32_t *a, const int32_t *c, float *out, int threads) {
#pragma omp parallel num_threads(threads)
    apply_rows(y, codes, SHARE(rows), columns, index, kind, bits, low, step, a, c, out);
}
