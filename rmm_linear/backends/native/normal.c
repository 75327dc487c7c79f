/* Normal codes of rows: rmm_linear/packing/normal.py in compiled form.
 *
 * Results equal those of plain PyTorch but for the last bits of the rotations and sums, which are made in another order.
 */
#define WIDE 128
#define WIDE_PARTS (WIDE / LANES)
#define WIDE_WORDS (2 * WIDE / 32)

typedef struct {
    float first[WIDE], second[WIDE]; /* the signs of both rotations, the second times the 1/128 that they leave out */
    int32_t *rows, *groups;          /* a and c */
} normal_noise;

static int begin_normal_noise(normal_noise *n, int64_t seed, int64_t first, int64_t rows, int64_t groups) {
    n->rows = malloc((rows + groups) * sizeof(int32_t) + 1);
    if (!n->rows) return 0;
    n->groups = n->rows + rows;
    uint64_t word[4];
    for (int64_t i = 0; i < (groups > WIDE_WORDS ? groups : WIDE_WORDS); i++) {
        philox(seed, ROUNDING_STREAM, (uint64_t)i, word);
        if (i < groups) n->groups[i] = (int32_t)(word[1] >> 9);
        for (int bit = 0; i < WIDE_WORDS && bit < 32; bit++) {
            float sign = 1 - 2 * (float)(word[2] >> bit & 1);
            if (i < WIDE_WORDS / 2) n->first[i * 32 + bit] = sign;
            else n->second[(i - WIDE_WORDS / 2) * 32 + bit] = sign / WIDE;
        }
    }
    for (int64_t i = 0; i < rows; i++) {
        philox(seed, ROUNDING_STREAM, (uint64_t)(first + i), word);
        n->rows[i] = (int32_t)(word[0] >> 9) | 0x3F800000;
    }
    return 1;
}

INLINE int group_bytes(int levels) { return levels == 4 ? 32 : levels == 3 ? 26 : 16; }

/* One of the two bytes whose scales are next to a number, with the probabilities that make it the mean. */
INLINE uint8_t scale_beside(float scale, float chance) {
    if (!(scale <= 0x1p32f)) return 255;
    int high = scale_byte(scale);
    float top = scale_of(high), bottom = top == scale ? 0 : scale_of(high - 1);
    if (top == scale) return (uint8_t)high;
    return (uint8_t)(chance < (scale - bottom) / (top - bottom) ? high : high - 1);
}

/* Of a normal number with the variance 1: the levels that are not negative, and where one ends and the next begins. */
INLINE float outer_level(int levels) { return levels == 4 ? 1.5104176f : levels == 3 ? 1.2240089f : 0.7978846f; }
INLINE float inner_level(int levels) { return levels == 4 ? 0.4527800f : 0; }
INLINE float edge_of(int levels) { return levels == 4 ? 0.9815988f : levels == 3 ? 0.6120044f : 0; }

INLINE void encode_group(
    const float *z, int size, int levels, const normal_noise *n, int32_t chance, uint8_t *codes, uint8_t *scale) {
    int bytes = group_bytes(levels), places = (WIDE + bytes - 1) / bytes, base = 1;
    float filled[WIDE];
    uint8_t digits[WIDE + LANES] = {0};
    lanes v[WIDE_PARTS], squares = {0}, sums = {0};
    if (size < WIDE) {
        memcpy(filled, z, size * sizeof(float));
        memset(filled + size, 0, (WIDE - size) * sizeof(float));
        z = filled;
    }
    for (int k = 0; k < WIDE_PARTS; k++) v[k] = LOAD(z + k * LANES) * LOAD(n->first + k * LANES);
    rotate_parts(v, WIDE_PARTS);
    for (int k = 0; k < WIDE_PARTS; k++) v[k] = v[k] * LOAD(n->second + k * LANES);
    rotate_parts(v, WIDE_PARTS);
    for (int k = 0; k < WIDE_PARTS; k++) squares += v[k] * v[k];
    float square = lanes_sum(squares);
    lanes edge = all(sqrtf(square / WIDE) * edge_of(levels));
    for (int k = 0; k < WIDE_PARTS; k++) {
        lanes magnitude = (lanes)((ints)v[k] & 0x7FFFFFFF);
        ints above = v[k] >= 0, outer = levels == 2 ? (ints){0} - 1 : magnitude >= edge; /* 0 or -1 */
        sums += magnitude * PICK(outer, all(outer_level(levels)), all(inner_level(levels)));
        ints digit = levels == 2 ? -above
                     : levels == 4 ? ((2 - outer) & above) | ((1 + outer) & ~above)
                                   : ((1 - outer) & above) | ((1 + outer) & ~above);
        store_bytes(digits + k * LANES, digit);
    }
    *scale = scale_beside(square == 0 ? 0 : square / lanes_sum(sums), as_float((uint32_t)chance) - 1);
    memset(codes, 0, bytes);
    for (int place = 0; place < places; place++, base *= levels)
        for (int i = 0; i < bytes; i++) codes[i] += (uint8_t)(digits[place * bytes + i] * base);
}

static void encode_rows(
    const hashed *m, float *buffer, int64_t begin, int64_t end, int levels, const normal_noise *n, uint8_t *codes,
    uint8_t *scales) {
    int64_t columns = m->columns, groups = (columns + WIDE - 1) / WIDE;
    for (int64_t row = begin; row < end; row++) {
        const float *z = hashed_row(m, row, buffer);
        for (int64_t group = 0; group < groups; group++) {
            int64_t left = columns - group * WIDE, place = row * groups + group;
            int32_t chance = n->rows[row] ^ n->groups[group];
            /* The number of levels is a constant in each call, so that the compiler specializes it. */
#define ENCODE(levels) \
    encode_group(z + group * WIDE, left < WIDE ? (int)left : WIDE, levels, n, chance, \
                 codes + place * group_bytes(levels), scales + place)
            if (levels == 4) ENCODE(4);
            else if (levels == 3) ENCODE(3);
            else ENCODE(2);
#undef ENCODE
        }
    }
}

INLINE void decode_group(const uint8_t *codes, int levels, float scale, void *z, int type, int64_t place) {
    int bytes = group_bytes(levels), places = (WIDE + bytes - 1) / bytes;
    uint8_t digits[WIDE + LANES], left[32];
    memcpy(left, codes, bytes);
    for (int at = 0; at < places; at++)
        for (int i = 0; i < bytes; i++) {
            uint8_t rest = left[i] / levels;
            digits[at * bytes + i] = left[i] - rest * levels, left[i] = rest;
        }
    for (int k = 0; k < WIDE_PARTS; k++) {
        ints digit = load_bytes(digits + k * LANES);
        lanes number = __builtin_convertvector(digit, lanes), level;
        if (levels == 2) level = (2 * number - 1) * outer_level(2);
        else if (levels == 3) level = (number - 1) * outer_level(3);
        else {
            lanes sign = (lanes)(((ints)(number - 1.5f) & (int)0x80000000) | 0x3F800000);
            level = sign * PICK((digit == 0) | (digit == 3), all(outer_level(4)), all(inner_level(4)));
        }
        store_elements(z, type, place + k * LANES, level * scale);
    }
}

/* Encodes the rows of m, or where there are more tokens than `rows` its CountSketch, as rmm_pack does. */
int V(rmm_encode_normal)(
    const void *m, int type, const int64_t *index, int64_t tokens, int64_t columns, int64_t stride, int64_t rows,
    int64_t seed, int64_t first, int levels, uint8_t *codes, uint8_t *scales, int threads) {
    int64_t segments = tokens > rows && rows ? (tokens + rows - 1) / rows : 1;
    int64_t *shifts = segments > 1 ? malloc(segments * sizeof(int64_t) + tokens) : NULL;
    int8_t *signs = (int8_t *)(shifts + (shifts ? segments : 0));
    normal_noise n;
    if (segments > 1 && !shifts) return 2;
    if (!begin_normal_noise(&n, seed, first, rows, (columns + WIDE - 1) / WIDE)) {
        free(shifts);
        return 2;
    }
    if (shifts) signs_and_shifts(seed, tokens, rows, signs, shifts);
    hashed source = {m, type, 1, index, tokens, columns, stride, rows, segments, shifts, signs};
    int result = 0;
#pragma omp parallel num_threads(threads) reduction(| : result)
    {
        float *buffer = malloc(columns * sizeof(float) + 1);
        if (!buffer) result = 2;
        else encode_rows(&source, buffer, SHARE(rows), levels, &n, codes, scales);
        free(buffer);
    }
    free(n.rows);
    free(shifts);
    return result;
}

/* codes, scales: of `groups` groups, one after the other. z: of a type, contiguous, 128 elements for each, rotated. */
void V(rmm_decode_normal)(
    const uint8_t *codes, const uint8_t *scales, int64_t groups, int levels, void *z, int type, int threads) {
#pragma omp parallel num_threads(threads)
    {
        int64_t range[2] = {SHARE(groups)};
        for (int64_t group = range[0]; group < range[1]; group++) {
            float scale = scale_of(scales[group]);
#define DECODE(levels) decode_group(codes + group * group_bytes(levels), levels, scale, z, type, group * WIDE)
            if (levels == 4) DECODE(4);
            else if (levels == 3) DECODE(3);
            else DECODE(2);
#undef DECODE
        }
    }
}

/* m: groups of 128 numbers of a type, rotated back in place. */
int V(rmm_unrotate_normal)(void *m, int type, int64_t groups, int64_t seed, int threads) {
    normal_noise n;
    if (!begin_normal_noise(&n, seed, 0, 0, 0)) return 2;
#pragma omp parallel num_threads(threads)
    {
        int64_t range[2] = {SHARE(groups)};
        for (int64_t group = range[0]; group < range[1]; group++) {
            lanes v[WIDE_PARTS];
            for (int k = 0; k < WIDE_PARTS; k++) v[k] = load_elements(m, type, group * WIDE + k * LANES);
            rotate_parts(v, WIDE_PARTS);
            for (int k = 0; k < WIDE_PARTS; k++) v[k] = v[k] * LOAD(n.second + k * LANES);
            rotate_parts(v, WIDE_PARTS);
            for (int k = 0; k < WIDE_PARTS; k++)
                store_elements(m, type, group * WIDE + k * LANES, v[k] * LOAD(n.first + k * LANES));
        }
    }
    free(n.rows);
    return 0;
}
