/* Runs the functions of the C library for any processor and prints a hash of what each writes: the same on every
 * machine. test_aarch64.py compiles it for two. */
#include "level_0.c"
#include <stdio.h>

enum { ROWS = 37, COLUMNS = 64 * 19 + 23, ELEMENTS = ROWS * COLUMNS, GROUPS = 20, TAKEN = 20 };

static float x[ELEMENTS], other[ELEMENTS], z[ELEMENTS], knots[256], gamma_[COLUMNS], buffer[5 * COLUMNS];
static uint16_t half[ELEMENTS], half_z[ELEMENTS];
static uint8_t scales[2][ROWS * GROUPS];
static uint8_t codes[2][ELEMENTS];
static float signs[2 * GROUP];
static int32_t a[2 * ROWS], c[2 * COLUMNS];
static double wide[2 * COLUMNS];

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

static void try_packing(const void *m, int type, void *out, int bits) {
    int64_t shifts[64], segments = (ROWS + 6) / 7;
    int8_t token_signs[64];
    float rstd[ROWS];
    memset(codes, 0, sizeof codes), memset(buffer, 0, sizeof buffer), memset(wide, 0, sizeof wide);
    rmm_pack_0(m, type, 0, ROWS, COLUMNS, COLUMNS, ROWS, 1, 0, 0, bits, signs, a, c, codes[0], scales[0], 1);
    PRINT(codes[0]), PRINT(scales[0]);
    rmm_unpack_0(codes[0], scales[0], ROWS, COLUMNS, bits, a, c, z, FLOAT32, 1), PRINT(z);
    rmm_unpack_0(codes[0], scales[0], ROWS, COLUMNS, bits, a, c, out, type, 1), PRINT(z), PRINT(half_z);
    rmm_unrotate_0(z, ROWS, COLUMNS, signs, 1), PRINT(z);
    rmm_signs_and_shifts_0(5, ROWS, 7, token_signs, shifts), print("signs", token_signs, ROWS);
    rmm_pack_0(
        m, type, 0, ROWS, COLUMNS, COLUMNS, 7, segments, shifts, token_signs, bits, signs, a, c, codes[0], scales[0], 1);
    PRINT(codes[0]);
    rmm_pack_norm_0(
        m, type, COLUMNS, 0, ROWS, COLUMNS, 1, 1e-5f, bits, signs, a, c, codes[0], scales[0], rstd, buffer, 1);
    PRINT(codes[0]), PRINT(rstd), memset(buffer, 0, sizeof buffer);
    rmm_norm_backward_0(
        m, type, COLUMNS, 0, ROWS, COLUMNS, 1, bits, gamma_, signs, a, c, codes[0], scales[0], rstd, out, type, buffer,
        wide, 1);
    PRINT(z), PRINT(half_z), PRINT(wide);
    for (int activation = 0; activation < 4; activation++) {
        rmm_pack_gated_0(
            m, m, type, COLUMNS, COLUMNS, ROWS, COLUMNS, 0, activation, bits, signs, a, c, codes[0], scales[0], codes[1],
            scales[1], buffer, 1);
        PRINT(codes);
        rmm_apply_gated_0(
            m, type, ROWS, COLUMNS, 0, bits, signs, a, c, codes[0], scales[0], codes[1], scales[1], out, 0, 1);
        PRINT(z), PRINT(half_z);
    }
}

/* Hadamard's transform, and Hartley's with any cosines and sines: which ones does not matter here. */
static void try_transforms(const void *m, int type, void *out) {
    int64_t order[64], taken[TAKEN];
    float factors[64], cosine[32], sine[32], weights[TAKEN];
    for (int i = 0; i < 64; i++) order[i] = i < ROWS ? i : -1, factors[i] = (float)(i % 2 * 2 - 1);
    for (int i = 0; i < 32; i++) cosine[i] = 1 - (float)i / 16, sine[i] = (float)i / 32;
    for (int i = 0; i < TAKEN; i++) taken[i] = i * 3 % 64, weights[i] = (float)(i + 1) / 8;
    rmm_transform_0(
        m, type, COLUMNS, COLUMNS, 64, order, factors, 0, 0, taken, 0, weights, 0, TAKEN, out, 1);
    PRINT(z), PRINT(half_z);
    rmm_transform_0(
        m, type, COLUMNS, COLUMNS, 64, order, factors, cosine, sine, taken, order, weights, weights, TAKEN, out, 1);
    PRINT(z), PRINT(half_z);
}

static void try_type(int type) {
    int64_t index[TAKEN];
    float scale[TAKEN];
    void *out = type == FLOAT32 ? (void *)z : half_z;
    const void *m = type == FLOAT32 ? (void *)x : half;
    if (type != FLOAT32) narrow(x, type, ELEMENTS, half, 0), PRINT(half);
    for (int i = 0; i < TAKEN; i++) index[i] = i * 7 % ROWS, scale[i] = (float)(i - 4) / 8;
    for (int bits = 2; bits <= 8; bits *= 2) try_packing(m, type, out, bits);
    rmm_countsketch_0(m, type, 0, ROWS, COLUMNS, COLUMNS, 7, 5, 0, 7, out, type, 1), PRINT(z), PRINT(half_z);
    rmm_countsketch_0(m, type, index, TAKEN, COLUMNS, COLUMNS, 7, 5, 2, 4, z, FLOAT32, 1), PRINT(z);
    rmm_gather_rows_0(m, type, COLUMNS, COLUMNS, index, scale, TAKEN, out, 1), PRINT(z), PRINT(half_z);
    for (int bits = 1; bits <= 8; bits *= 2) {
        float most = (float)((1 << bits) - 1);
        for (int i = 0; i < 256; i++) knots[i] = i / 255.0f * most;
        rmm_pack_derivative_0(
            m, type, COLUMNS, ROWS, COLUMNS, 0, TABLE, bits, knots, 256, -4, 31.875f, 4, 0, most, a, c, codes[0], 1);
        PRINT(codes[0]);
        rmm_apply_derivative_0(m, type, codes[0], ROWS, COLUMNS, 0, TABLE, bits, -0.1f, 0.3f, a, c, out, 1);
        PRINT(z), PRINT(half_z);
    }
    try_transforms(m, type, out);
    rmm_pack_mask_0(x, 4, ROWS, COLUMNS, 0, codes[0], 1), PRINT(codes[0]);
    rmm_apply_mask_0(m, type, codes[0], ROWS, COLUMNS, 0, 1.25f, out, 1), PRINT(z), PRINT(half_z);
}

int main(void) {
    for (int i = 0; i < ELEMENTS; i++) x[i] = normal(), other[i] = normal();
    for (int i = 0; i < COLUMNS; i++) gamma_[i] = 1 + i * 1e-3f;
    for (int i = 0; i < 2; i++) rmm_rounding_noise_0(7 + i, 1, ROWS, COLUMNS, signs + i * GROUP, a + i * ROWS, c + i * COLUMNS);
    PRINT(signs), PRINT(a), PRINT(c);
    for (int type = FLOAT32; type <= FLOAT16; type++) try_type(type);
    rmm_softmax_gradients_0(x, other, ROWS, COLUMNS, 1), PRINT(x), PRINT(other);
    return 0;
}
