/* Runs every function of the C library for any processor and prints a hash of what each writes: the same on every
 * machine. test_aarch64.py compiles it for two. */
#include "level_0.c"
#include <stdio.h>

enum { ROWS = 37, COLUMNS = 64 * 19 + 23, ELEMENTS = ROWS * COLUMNS, TAKEN = 20, ODD = 5, SEED = 1234567 };

static float x[ELEMENTS], other[ELEMENTS], gamma_[COLUMNS], rstds[COLUMNS], totals[2][COLUMNS];
static uint16_t half[ELEMENTS];
static uint8_t out[4 * ELEMENTS], more[4 * ELEMENTS], codes[2][2 * ELEMENTS], scales[2][ELEMENTS];
static int32_t knots[256];

static float normal(void) {
    static uint64_t state = 88172645463325252u;
    float sum = 0;
    for (int i = 0; i < 6; i++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        sum += (float)(state >> 40) / 8388608.0f - 1;
    }
    return sum;
}

static void print(const char *name, const void *bytes, size_t count) {
    uint64_t hash = 1469598103934665603u;
    for (size_t i = 0; i < count; i++) hash = (hash ^ ((const uint8_t *)bytes)[i]) * 1099511628211u;
    printf("%s %016llx\n", name, (unsigned long long)hash);
}

#define PRINT(array) print(#array, array, sizeof array)
#define PRINT_ALL() PRINT(out), PRINT(more), PRINT(codes), PRINT(scales), PRINT(rstds), PRINT(totals)

static void try_matrices(const void *m, int type, const int64_t *index, const float *scale) {
    rmm_gather_rows_0(m, type, COLUMNS, COLUMNS, index, scale, TAKEN, out, 1), PRINT(out);
    rmm_countsketch_0(m, type, 0, ROWS, COLUMNS, COLUMNS, 7, 5, 0, 7, out, type, 1), PRINT(out);
    rmm_countsketch_0(m, type, index, TAKEN, COLUMNS, COLUMNS, 7, 5, 2, 4, out, FLOAT32, 1), PRINT(out);
    for (int bits = 2; bits <= 8; bits += bits == 4 ? 4 : 1) {
        rmm_pack_0(m, type, 0, ROWS, COLUMNS, COLUMNS, ROWS, SEED, 0, bits, codes[0], scales[0], 1), PRINT_ALL();
        rmm_pack_0(m, type, index, TAKEN, COLUMNS, COLUMNS, 7, SEED, 3, bits, codes[1], scales[1], 1), PRINT_ALL();
        for (int is_back = 0; is_back < 2; is_back++)
            rmm_unpack_0(codes[0], scales[0], 0, ROWS, COLUMNS, bits, SEED, is_back, out, type, 1), PRINT(out);
        rmm_unpack_0(codes[0], scales[0], 0, ROWS, COLUMNS, bits, SEED, 0, more, FLOAT32, 1);
        rmm_unrotate_0(more, FLOAT32, ROWS, COLUMNS, SEED, 1), rmm_unrotate_0(out, type, ROWS, COLUMNS, SEED, 1);
        PRINT(more), PRINT(out);
    }
    for (int levels = 2; levels <= 4; levels++) {
        int64_t groups = TAKEN * ((COLUMNS + WIDE - 1) / WIDE);
        rmm_encode_normal_0(m, type, 0, TAKEN, COLUMNS, COLUMNS, TAKEN, SEED, 0, levels, codes[0], scales[0], 1);
        rmm_decode_normal_0(codes[0], scales[0], groups, levels, out, FLOAT32, 1);
        rmm_unrotate_normal_0(out, FLOAT32, groups, SEED, 1), PRINT_ALL();
    }
}

static void try_modules(const void *m, int type, const int64_t *index) {
    for (int bits = 2; bits <= 8; bits += bits == 4 ? 4 : 1) {
        for (int centered = 0; centered < 2; centered++) {
            rmm_pack_norm_0(
                m, type, COLUMNS, index, TAKEN, COLUMNS, centered, 1e-5f, bits, SEED, codes[0], scales[0], rstds, 1);
            rmm_norm_backward_0(
                m, type, COLUMNS, index, TAKEN, COLUMNS, centered, bits, gamma_, SEED, codes[0], scales[0], rstds, out,
                type, totals[0], totals[1], 1);
            PRINT_ALL();
        }
        for (int form = 0; form < 4; form++) { /* by samples or not, of channels last or first */
            int64_t groups = form % 2 ? 3 : 0, places = form < 2 ? 7 : 1, length = form < 2 ? 1 : 70;
            int64_t channels = form < 2 ? 66 : 6, rows = form < 2 ? ODD * 7 : ODD, columns = form < 2 ? 66 : 6 * 70;
            rmm_pack_channels_0(
                m, type, ODD, places, channels, length, groups, rows, columns, 1e-5f, 0, 0, bits, SEED, codes[0],
                scales[0], rstds, 1);
            rmm_channel_gradients_0(
                m, type, ODD, places, channels, length, groups, rows, columns, bits, gamma_, SEED, codes[0], scales[0],
                rstds, out, type, totals[0], totals[1], 1);
            PRINT_ALL();
        }
        for (int activation = 0; activation < 4; activation++) {
            rmm_pack_gated_0(
                m, m, type, COLUMNS, COLUMNS, ROWS, COLUMNS, 0, activation, bits, SEED, SEED + 1, codes[0], scales[0],
                codes[1], scales[1], 1);
            rmm_apply_gated_0(
                m, type, ROWS, COLUMNS, 0, bits, SEED, SEED + 1, codes[0], scales[0], codes[1], scales[1], out, more, 1);
            PRINT_ALL();
        }
    }
    for (int bits = 1; bits <= 8; bits *= 2) {
        int64_t seed = SEED;
        for (int i = 0; i < 256; i++) knots[i] = 200 * i | 200 << 16;
        rmm_pack_derivative_0(
            m, type, COLUMNS, ROWS, COLUMNS, 0, TABLE, bits, knots, 256, (float)((1 << bits) - 1) / 51200, -4, 32, 4, 0,
            (float)((1 << bits) - 1), &seed, codes[0], 0, 1);
        rmm_apply_derivative_0(m, type, codes[0], ROWS, COLUMNS, 0, TABLE, bits, -0.1f, 0.3f, SEED, out, 1), PRINT_ALL();
    }
    for (int kind = RELU; kind <= HARDTANH; kind++) {
        rmm_pack_derivative_0(
            m, type, COLUMNS, ROWS, COLUMNS, 0, kind, 1, 0, 0, 0, 0.1f, 0, 1.5f, 0, 0, 0, codes[0], more, 1);
        rmm_apply_derivative_0(m, type, codes[0], ROWS, COLUMNS, 0, kind, 1, 0.1f, 0, 0, out, 1), PRINT_ALL();
    }
    rmm_pack_mask_0(m, type == FLOAT32 ? 4 : 2, ROWS, COLUMNS, 0, codes[0], 1);
    rmm_apply_mask_0(m, type, codes[0], ROWS, COLUMNS, 0, 1.25f, out, 1), PRINT_ALL();
}

/* Hadamard's transform, and Hartley's with any cosines and sines: which ones does not matter here. */
static void try_transforms(const void *m, int type) {
    int64_t order[64], taken[TAKEN];
    float factors[64], cosine[32], sine[32], weights[TAKEN];
    for (int i = 0; i < 64; i++) order[i] = i < ROWS ? i : -1, factors[i] = (float)(i % 2 * 2 - 1);
    for (int i = 0; i < 32; i++) cosine[i] = 1 - (float)i / 16, sine[i] = (float)i / 32;
    for (int i = 0; i < TAKEN; i++) taken[i] = i * 3 % 64, weights[i] = (float)(i + 1) / 8;
    rmm_transform_0(m, type, COLUMNS, COLUMNS, 64, order, factors, 0, 0, taken, 0, weights, 0, TAKEN, out, 1), PRINT(out);
    rmm_transform_0(
        m, type, COLUMNS, COLUMNS, 64, order, factors, cosine, sine, taken, order, weights, weights, TAKEN, out, 1);
    PRINT(out);
}

static void try_pools(void) {
    for (int64_t is_last = 0; is_last < 2; is_last++)
        for (int64_t step = 1; step < 4; step++) {
            int64_t size = 19, kernel = 3, outputs = (size + 2 - kernel) / step + 1;
            int64_t sizes[] = {3, 7, size, size, outputs, outputs, kernel, kernel, step, step, 1, 1, 1, 1, is_last};
            rmm_max_pool_0(x, sizes, 4, (float *)out, codes[0], 1);
            rmm_max_pool_backward_0((float *)out, sizes, 4, codes[0], (float *)more, 1), PRINT_ALL();
        }
}

int main(void) {
    int64_t index[TAKEN], counters[TAKEN], words[4 * TAKEN], shifts[64];
    int8_t signs[64];
    float scale[TAKEN];
    for (int i = 0; i < ELEMENTS; i++) x[i] = normal(), other[i] = normal();
    for (int i = 0; i < COLUMNS; i++) gamma_[i] = 1 + i * 1e-3f;
    for (int i = 0; i < TAKEN; i++) index[i] = i * 7 % ROWS, scale[i] = (float)(i - 4) / 8, counters[i] = i * i;
    for (int type = FLOAT32; type <= FLOAT16; type++) {
        const void *m = type == FLOAT32 ? (void *)x : half;
        if (type != FLOAT32) narrow(x, type, ELEMENTS, half, 0), PRINT(half);
        try_matrices(m, type, index, scale), try_modules(m, type, index), try_transforms(m, type);
    }
    try_pools();
    rmm_philox_0(SEED, 3, TAKEN, counters, words), PRINT(words);
    rmm_signs_and_shifts_0(5, ROWS, 7, signs, shifts), print("signs", signs, ROWS), print("shifts", shifts, 8 * ((ROWS + 6) / 7));
    rmm_softmax_gradients_0(x, other, ROWS, COLUMNS, 1), PRINT(x), PRINT(other);
    return 0;
}
