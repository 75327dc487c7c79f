/* The packed products of a gated MLP: rmm_linear/packing/gated.py in compiled form. */
#include <stdint.h>
#include <string.h>

#include "packing.h"
#include "variants.h"

#define INLINE static inline __attribute__((always_inline))

enum { GELU, GELU_TANH, SILU, RELU };

/* Two independent seeds: signs of the rotation (64 each), numbers of rows and of columns, as in RoundingNoise. */
typedef struct {
    const float *signs;
    const int32_t *rows, *columns;
} noise;

/* A packed matrix; codes is null where it is not wanted. */
typedef struct {
    uint8_t *codes;
    uint16_t *qparams;
} packed;

/* e^x to 2^-22 or so of itself, by Cephes; x beyond float32's range is cut off. */
INLINE lanes exponential(lanes x) {
    lanes zero = {0}, low = zero - 87.0f, high = zero + 88.0f;
    x = MAX(x, low), x = MIN(x, high);
    lanes magic = zero + 12582912.0f, n = (x * 1.44269504f + magic) - magic;
    lanes r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f, y = y * r + 4.1665795894e-2f, y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f, y = y * r * r + r + 1.0f;
    return y * (lanes)((__builtin_convertvector(n, ints) + 127) << 23);
}

/* The error function to a few units of its last place: a rational function of x², 1 beyond 4. */
INLINE lanes error_function(lanes x) {
    lanes zero = {0};
    x = MAX(x, zero - 4.0f), x = MIN(x, zero + 4.0f);
    lanes s = x * x;
    lanes p = s * -2.72614225801306e-10f + 2.77068142495902e-08f;
    p = p * s + -2.10102402082508e-06f, p = p * s + -5.69250639462346e-05f, p = p * s + -7.34990630326855e-04f;
    p = p * s + -2.95459980854025e-03f, p = p * s + -1.60960333262415e-02f;
    lanes q = s * -1.45660718464996e-05f + -2.13374055278905e-04f;
    q = q * s + -1.68282697438203e-03f, q = q * s + -7.37332916720468e-03f, q = q * s + -1.42647390514189e-02f;
    return x * p / q;
}

/* Replaces x by act(x), and returns act'(x). NaN stays NaN, by a product with x. */
INLINE lanes activate(lanes *x, int activation) {
    lanes v = *x, zero = {0};
    if (activation == GELU) {
        lanes phi = 0.5f + 0.5f * error_function(v * 0.70710678f);
        *x = v * phi;
        return phi + v * (exponential(-0.5f * v * v) * 0.39894228f);
    }
    if (activation == RELU) {
        ints below = v <= zero;
        *x = PICK(below, zero, v);
        return PICK(below, zero, (zero + 1.0f));
    }
    lanes inner = v, slope = zero + 1.0f; /* act(x) = x · sigmoid(inner), slope = inner' */
    if (activation == GELU_TANH) {
        inner = v * (1.59576912f + 0.071354816f * v * v);
        slope = 1.59576912f + 0.214064449f * v * v;
    }
    lanes sigmoid = 1.0f / (1.0f + exponential(-inner));
    *x = v * sigmoid;
    return sigmoid + v * slope * (sigmoid * (1.0f - sigmoid));
}

INLINE void rotate_and_pack(
    lanes v[PARTS], const noise *n, int which, int64_t row, int64_t rows, int64_t columns, int64_t group, int bits,
    packed to, int *not_finite) {
    int64_t groups = (columns + GROUP - 1) / GROUP, bytes = (columns * bits + 7) / 8;
    const int32_t *c = n->columns + which * columns + group * GROUP;
    int32_t a = n->rows[which * rows + row];
    uint8_t *codes = to.codes + row * bytes + group * 8 * bits;
    uint16_t *qparams = to.qparams + (row * groups + group) * 2;
    if (columns - group * GROUP >= GROUP) {
        for (int k = 0; k < PARTS; k++) v[k] *= LOAD(n->signs + which * GROUP + k * LANES);
        rotate(v);
        pack_group(v, bits, a, c, codes, qparams, not_finite);
    } else {
        pack_short_group((const float *)v, (int)(columns - group * GROUP), bits, a, c, codes, qparams, not_finite);
    }
}

INLINE int pack_all(
    const float *a, const float *b, int64_t stride_a, int64_t stride_b, int64_t begin, int64_t end, int64_t rows,
    int64_t columns, const int64_t *index, int activation, int bits, const noise *n, packed p, packed s) {
    int not_finite = 0;
    for (int64_t row = begin; row < end; row++) {
        int64_t from = index ? index[row] : row;
        for (int64_t group = 0; group * GROUP < columns; group++) {
            const float *x = a + from * stride_a + group * GROUP, *y = b + from * stride_b + group * GROUP;
            int64_t size = columns - group * GROUP;
            lanes value[PARTS], product[PARTS];
            if (size < GROUP) {
                memset(value, 0, sizeof value), memset(product, 0, sizeof product);
                memcpy(value, x, size * sizeof(float)), memcpy(product, y, size * sizeof(float));
            } else {
                for (int k = 0; k < PARTS; k++) value[k] = LOAD(x + k * LANES), product[k] = LOAD(y + k * LANES);
            }
            for (int k = 0; k < PARTS; k++) product[k] *= activate(value + k, activation);
            if (p.codes) rotate_and_pack(product, n, 0, row, rows, columns, group, bits, p, &not_finite);
            if (s.codes) rotate_and_pack(value, n, 1, row, rows, columns, group, bits, s, &not_finite);
        }
    }
    return not_finite;
}

/* Activation and bits are constants in each call, so that the compiler specializes it. */
#define PACK(activation, bits) \
    return pack_all(a, b, stride_a, stride_b, begin, end, rows, columns, index, activation, bits, n, p, s)
#define PACK_BITS(activation)               \
    {                                       \
        if (bits == 4) PACK(activation, 4); \
        if (bits == 2) PACK(activation, 2); \
        PACK(activation, 8);                \
    }

VARIANTS static int pack_rows(
    const float *a, const float *b, int64_t stride_a, int64_t stride_b, int64_t begin, int64_t end, int64_t rows,
    int64_t columns, const int64_t *index, int activation, int bits, const noise *n, packed p, packed s) {
    if (activation == GELU) PACK_BITS(GELU)
    if (activation == GELU_TANH) PACK_BITS(GELU_TANH)
    if (activation == SILU) PACK_BITS(SILU)
    PACK_BITS(RELU)
}

INLINE void unpack_and_multiply(
    const float *y, int64_t row, int64_t rows, int64_t columns, int64_t group, int bits, const noise *n, int which,
    packed from, float *out) {
    int64_t groups = (columns + GROUP - 1) / GROUP, bytes = (columns * bits + 7) / 8, left = columns - group * GROUP;
    int size = left < GROUP ? (int)left : GROUP;
    lanes v[PARTS];
    const uint8_t *codes = from.codes + row * bytes + group * 8 * bits;
    const uint16_t *qparams = from.qparams + (row * groups + group) * 2;
    int32_t a = n->rows[which * rows + row];
    const int32_t *c = n->columns + which * columns + group * GROUP;
    if (size < GROUP) {
        unpack_short_group(size, bits, codes, a, c, qparams, (float *)v);
        for (int i = 0; i < size; i++) out[i] = y[i] * v[i / LANES][i % LANES];
        return;
    }
    unpack_group(bits, codes, a, c, qparams, v);
    rotate(v);
    for (int k = 0; k < PARTS; k++) {
        lanes signs = LOAD(n->signs + which * GROUP + k * LANES);
        STORE(out + k * LANES, v[k] * signs * LOAD(y + k * LANES));
    }
}

VARIANTS static void apply_rows(
    const float *y, int64_t begin, int64_t end, int64_t rows, int64_t columns, const int64_t *index, int bits,
    const noise *n, packed p, packed s, float *da, float *db) {
    for (int64_t row = begin; row < end; row++)
        for (int64_t group = 0; group * GROUP < columns; group++) {
            int64_t place = (index ? index[row] : row) * columns + group * GROUP;
            if (da) unpack_and_multiply(y + place, row, rows, columns, group, bits, n, 0, p, da + place);
            if (db) unpack_and_multiply(y + place, row, rows, columns, group, bits, n, 1, s, db + place);
        }
}

/* a, b: rows of `columns` numbers, `stride` apart. index: `rows` of their rows, or null. signs: (2, 64), row_noise:
 * (2, rows), column_noise: (2, columns): for p and for s. Codes are null where not wanted. Returns 1 if qparams are not
 * finite, else 0. */
int rmm_pack_gated(
    const float *a, const float *b, int64_t stride_a, int64_t stride_b, int64_t rows, int64_t columns,
    const int64_t *index, int activation, int bits, const float *signs, const int32_t *row_noise,
    const int32_t *column_noise, uint8_t *p_codes, uint16_t *p_qparams, uint8_t *s_codes, uint16_t *s_qparams,
    int threads) {
    noise n = {signs, row_noise, column_noise};
    packed p = {p_codes, p_qparams}, s = {s_codes, s_qparams};
    int result = 0;
#pragma omp parallel num_threads(threads) reduction(| : result)
    result = pack_rows(a, b, stride_a, stride_b, SHARE(rows), rows, columns, index, activation, bits, &n, p, s);
    return result;
}

/* y, da, db: contiguous; da and db are null where not wanted, and rows that are not in `index` are left as they are. */
void rmm_apply_gated(
    const float *y, int64_t rows, int64_t columns, const int64_t *index, int bits, const float *signs,
    const int32_t *row_noise, const int32_t *column_noise, uint8_t *p_codes, uint16_t *p_qparams, uint8_t *s_codes,
    uint16_t *s_qparams, float *da, float *db, int threads) {
    noise n = {signs, row_noise, column_noise};
    packed p = {p_codes, p_qparams}, s = {s_codes, s_qparams};
#pragma omp parallel num_threads(threads)
    apply_rows(y, SHARE(rows), rows, columns, index, bits, &n, p, s, da, db);
}
