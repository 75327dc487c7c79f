/* Softmax of rows of scores and its gradient: rmm_linear/packing/attention_gradients.py in compiled form. */
#include <math.h>
#include <stdint.h>
#include <string.h>

#include "variants.h"

#define LANES 16

typedef float lanes __attribute__((vector_size(LANES * sizeof(float))));
typedef float stored_lanes __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));
typedef int32_t ints __attribute__((vector_size(LANES * sizeof(int32_t))));

#define LOAD(pointer) (*(const stored_lanes *)(pointer))
#define STORE(pointer, v) (*(stored_lanes *)(pointer) = (v))
#define PICK(mask, a, b) ((lanes)(((ints)(a) & (mask)) | ((ints)(b) & ~(mask))))
#define ROUNDING 12582912.0f /* 1.5 * 2^23: a number that is added to it is rounded to an integer */

/* e^x for x <= 0, within 2 units in the last place; 0 below -87. A NaN stays one.
 * x = n log 2 + r; log 2 in two parts, so that r is exact, and e^r by its polynomial of degree 7 (Cephes). */
static inline __attribute__((always_inline)) lanes exponential(lanes x) {
    lanes zero = {0}, shifted = x * 1.44269504f + ROUNDING, n = shifted - ROUNDING;
    lanes r = x - n * 0.693359375f + n * 2.12194440e-4f;
    lanes y = r * 1.9875691500e-4f + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    ints power = ((ints)shifted << 23) + 0x3F800000; /* 2^n */
    return PICK(x < -87.0f, zero, y * (lanes)power);
}

static inline __attribute__((always_inline)) float sum_of(lanes v) {
    float total = 0;
    for (int i = 0; i < LANES; i++) total += v[i];
    return total;
}

/* One row: P in place of the scores, and P (dP - <P, dP>) in place of dP. `tail`: room for the last, shorter lanes. */
static inline __attribute__((always_inline)) void softmax_row(float *scores, float *dp, int64_t columns) {
    float tail[2 * LANES];
    int64_t whole = columns / LANES * LANES, rest = columns - whole;
    for (int i = 0; i < LANES; i++)
        tail[i] = i < rest ? scores[whole + i] : -INFINITY, tail[LANES + i] = i < rest ? dp[whole + i] : 0.0f;
    lanes high = LOAD(tail), sum, product;
    for (int64_t i = 0; i < whole; i += LANES) high = PICK(LOAD(scores + i) > high, LOAD(scores + i), high);
    float most = high[0];
    for (int i = 1; i < LANES; i++) most = high[i] > most ? high[i] : most;
    if (most == -INFINITY) { /* nothing is seen: 0, but NaN where a score is NaN */
        for (int64_t i = 0; i < columns; i++) {
            float value = scores[i] == -INFINITY ? 0.0f : NAN;
            scores[i] = value, dp[i] = value;
        }
        return;
    }
    STORE(tail, exponential(LOAD(tail) - most));
    sum = LOAD(tail), product = sum * LOAD(tail + LANES);
    for (int64_t i = 0; i < whole; i += LANES) {
        lanes e = exponential(LOAD(scores + i) - most);
        STORE(scores + i, e);
        sum += e, product += e * LOAD(dp + i);
    }
    float inverse = 1 / sum_of(sum), delta = sum_of(product) * inverse;
    for (int64_t i = 0; i < whole; i += LANES) {
        lanes p = LOAD(scores + i) * inverse;
        STORE(scores + i, p);
        STORE(dp + i, p * (LOAD(dp + i) - delta));
    }
    for (int i = 0; i < rest; i++) {
        float p = tail[i] * inverse;
        scores[whole + i] = p, dp[whole + i] = p * (tail[LANES + i] - delta);
    }
}

VARIANTS static void softmax_rows(float *scores, float *dp, int64_t begin, int64_t end, int64_t columns) {
    for (int64_t row = begin; row < end; row++) softmax_row(scores + row * columns, dp + row * columns, columns);
}

/* scores, dp: float32, (rows, columns), contiguous; both are overwritten. */
void rmm_softmax_gradients(float *scores, float *dp, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel num_threads(threads)
    softmax_rows(scores, dp, SHARE(rows), columns);
}
