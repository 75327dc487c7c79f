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

static void fill_noise(int64_t seed, int64_t first, int64_t rows, int64_t columns, float *signs, int32_t *a, int32_t *c) {
    for (int64_t i = 0; i < (columns > 2 ? columns : 2); i++) {
        uint64_t word[4];
        philox(seed, ROUNDING_STREAM, (uint64_t)i, word);
        if (i < columns) c[i] = (int32_t)(word[1] >> 9);
        if (first == 0 && i < rows) a[i] = (int32_t)(word[0] >> 9) | 0x3F800000;
        for (int bit = 0; i < 2 && bit < 32; bit++) signs[i * 32 + bit] = 1 - 2 * (float)(word[2] >> bit & 1);
    }
    for (int64_t i = first ? 0 : columns; i < rows; i++) {
        uint64_t word[4];
        philox(seed, ROUNDING_STREAM, (uint64_t)(first + i), word);
        a[i] = (int32_t)(word[0] >> 9) | 0x3F800000;
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
