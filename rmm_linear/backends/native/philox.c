/* Philox 4x32-10 and random numbers made from it: rmm_linear/sketches/philox.py in compiled form, bit for bit.
 *
 * Source: Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3".
 */
INLINE void philox(int64_t seed, int64_t stream, uint64_t counter, uint64_t c[4]) {
    uint64_t c0 = (uint32_t)counter, c1 = counter >> 32, c2 = (uint32_t)stream, c3 = 0;
    uint32_t key_a = (uint32_t)seed, key_b = (uint32_t)((uint64_t)seed >> 32);
    for (int round = 0; round < 10; round++) {
        uint64_t a = c0 * 0xD2511F53u, b = c2 * 0xCD9E8D57u;
        c0 = (b >> 32) ^ c1 ^ key_a, c1 = (uint32_t)b;
        c2 = (a >> 32) ^ c3 ^ key_b, c3 = (uint32_t)a;
        key_a += 0x9E3779B9u, key_b += 0xBB67AE85u;
    }
    c[0] = c0, c[1] = c1, c[2] = c2, c[3] = c3;
}

/* counters: n. words: (4, n), each in [0, 2**32). */
void V(rmm_philox)(int64_t seed, int64_t stream, int64_t n, const int64_t *counters, int64_t *words) {
    for (int64_t i = 0; i < n; i++) {
        uint64_t c[4];
        philox(seed, stream, (uint64_t)counters[i], c);
        for (int word = 0; word < 4; word++) words[word * n + i] = (int64_t)c[word];
    }
}

/* Signs and shifts of rmm_linear/sketches/countsketch.py. signs: `tokens`. shifts: ⌈tokens / rows⌉, one per segment. */
static void signs_and_shifts(int64_t seed, int64_t tokens, int64_t rows, int8_t *signs, int64_t *shifts) {
    int64_t segments = (tokens + rows - 1) / rows, words = (tokens + 31) / 32;
    for (int64_t i = 0; i < (words > segments ? words : segments); i++) {
        uint64_t c[4];
        philox(seed, 0, (uint64_t)i, c);
        for (int64_t token = i * 32; token < (i + 1) * 32 && token < tokens; token++)
            signs[token] = token < rows ? 1 : (int8_t)(1 - 2 * (int)(c[0] >> (token - i * 32) & 1));
        if (i < segments) shifts[i] = i ? (int64_t)(c[1] * (uint64_t)rows >> 32) : 0;
    }
}

void V(rmm_signs_and_shifts)(int64_t seed, int64_t tokens, int64_t rows, int8_t *signs, int64_t *shifts) {
    signs_and_shifts(seed, tokens, rows, signs, shifts);
}

/* RoundingNoise of rmm_linear/packing/rounding.py: 64 signs of the rotation, and the numbers of rows and of columns. */
typedef struct {
    float signs[GROUP];
    int32_t *rows, *columns;
} noise;

enum { ROUNDING_STREAM = 3 };

#if LANES >= 8
enum { MANY = 16 };

/* The first two words of some counters in a row. Numbers of 32 bits, each in the lower half of one of 64. */
static void philox_many(int64_t seed, uint64_t counter, uint64_t to[2][MANY]) {
    typedef uint64_t longs __attribute__((vector_size(LANES * sizeof(float))));
    enum { AT_ONCE = LANES / 2, COUNT = MANY / AT_ONCE };
    uint32_t key_a = (uint32_t)seed, key_b = (uint32_t)((uint64_t)seed >> 32);
    longs c[4][COUNT];
    for (int k = 0; k < COUNT; k++) {
        for (int i = 0; i < AT_ONCE; i++) c[1][k][i] = counter + k * AT_ONCE + i;
        c[0][k] = c[1][k] & 0xFFFFFFFFu, c[1][k] >>= 32;
        c[2][k] = (longs){0} + ROUNDING_STREAM, c[3][k] = (longs){0};
    }
    for (int round = 0; round < 10; round++, key_a += 0x9E3779B9u, key_b += 0xBB67AE85u)
        for (int k = 0; k < COUNT; k++) {
            longs by_a = (longs){0} + 0xD2511F53u, by_b = (longs){0} + 0xCD9E8D57u;
#if LANES == 16
            longs a = (longs)_mm512_mul_epu32((__m512i)c[0][k], (__m512i)by_a);
            longs b = (longs)_mm512_mul_epu32((__m512i)c[2][k], (__m512i)by_b);
#else
            longs a = (longs)_mm256_mul_epu32((__m256i)c[0][k], (__m256i)by_a);
            longs b = (longs)_mm256_mul_epu32((__m256i)c[2][k], (__m256i)by_b);
#endif
            c[0][k] = (b >> 32) ^ c[1][k] ^ key_a, c[1][k] = b & 0xFFFFFFFFu;
            c[2][k] = (a >> 32) ^ c[3][k] ^ key_b, c[3][k] = a & 0xFFFFFFFFu;
        }
    memcpy(to[0], c[0], sizeof(c[0])), memcpy(to[1], c[1], sizeof(c[1]));
}
#endif

static void fill_noise(int64_t seed, int64_t first, int64_t rows, int64_t columns, float *signs, int32_t *a, int32_t *c) {
    for (int64_t i = 0; i < 2; i++) {
        uint64_t word[4];
        philox(seed, ROUNDING_STREAM, (uint64_t)i, word);
        for (int bit = 0; bit < 32; bit++) signs[i * 32 + bit] = 1 - 2 * (float)(word[2] >> bit & 1);
    }
    int64_t most = !first && rows > columns ? rows : columns, i = 0;
#if LANES >= 8
    for (uint64_t word[2][MANY]; i + MANY <= most; i += MANY) {
        philox_many(seed, (uint64_t)i, word);
        for (int64_t k = 0; k < MANY && i + k < columns; k++) c[i + k] = (int32_t)(word[1][k] >> 9);
        for (int64_t k = 0; !first && k < MANY && i + k < rows; k++)
            a[i + k] = (int32_t)(word[0][k] >> 9) | 0x3F800000;
    }
#endif
    for (uint64_t word[4]; i < most; i++) {
        philox(seed, ROUNDING_STREAM, (uint64_t)i, word);
        if (i < columns) c[i] = (int32_t)(word[1] >> 9);
        if (!first && i < rows) a[i] = (int32_t)(word[0] >> 9) | 0x3F800000;
    }
    for (uint64_t word[4]; first && i - most < rows; i++) {
        philox(seed, ROUNDING_STREAM, (uint64_t)(first + i - most), word);
        a[i - most] = (int32_t)(word[0] >> 9) | 0x3F800000;
    }
}

/* Numbers of the rows from `first` on. Returns false if memory could not be allocated. */
static int begin_noise(noise *n, int64_t seed, int64_t first, int64_t rows, int64_t columns) {
    n->rows = malloc((rows + columns) * sizeof(int32_t) + 1);
    if (!n->rows) return 0;
    n->columns = n->rows + rows;
    fill_noise(seed, first, rows, columns, n->signs, n->rows, n->columns);
    return 1;
}

static void end_noise(noise *n) { free(n->rows); }
