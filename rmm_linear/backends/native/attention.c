/* Softmax of rows of scores and its gradient: rmm_linear/packing/attention_gradients.py in compiled form. */
/* 0 below -87. */
INLINE lanes exponential_below_0(lanes x) {
    ints is_small = x < all(-87.0f);
    return PICK(is_small, all(0), exponential(x));
}

/* One row: P in place of the scores, and P (dP - <P, dP>) in place of dP. `tail`: room for the last, shorter lanes. */
INLINE void softmax_row(float *scores, float *dp, int64_t columns) {
    float tail[2 * LANES];
    int64_t whole = columns / LANES * LANES, rest = columns - whole;
    for (int i = 0; i < LANES; i++)
        tail[i] = i < rest ? scores[whole + i] : -INFINITY, tail[LANES + i] = i < rest ? dp[whole + i] : 0.0f;
    lanes high = LOAD(tail), sum, product;
    for (int64_t i = 0; i < whole; i += LANES) high = MAX(LOAD(scores + i), high);
    float most = high[0];
    for (int i = 1; i < LANES; i++) most = high[i] > most ? high[i] : most;
    if (most == -INFINITY) { /* nothing is seen: 0, but NaN where a score is NaN */
        for (int64_t i = 0; i < columns; i++) {
            float value = scores[i] == -INFINITY ? 0.0f : NAN;
            scores[i] = value, dp[i] = value;
        }
        return;
    }
    STORE(tail, exponential_below_0(LOAD(tail) - most));
    sum = LOAD(tail), product = sum * LOAD(tail + LANES);
    for (int64_t i = 0; i < whole; i += LANES) {
        lanes e = exponential_below_0(LOAD(scores + i) - most);
        STORE(scores + i, e);
        sum += e, product += e * LOAD(dp + i);
    }
    float inverse = 1 / lanes_sum(sum), delta = lanes_sum(product) * inverse;
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

static void softmax_rows(float *scores, float *dp, int64_t begin, int64_t end, int64_t columns) {
    for (int64_t row = begin; row < end; row++) softmax_row(scores + row * columns, dp + row * columns, columns);
}

/* scores, dp: float32, (rows, columns), contiguous; both are overwritten. */
void V(rmm_softmax_gradients)(float *scores, float *dp, int64_t rows, int64_t columns, int threads) {
#pragma omp parallel num_threads(threads)
    softmax_rows(scores, dp, SHARE(rows), columns);
}
