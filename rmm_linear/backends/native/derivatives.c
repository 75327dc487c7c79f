/* Derivatives of pointwise functions in few bits: rmm_linear/packing/derivatives.py in compiled form. */
/* g', in steps above its low end: linear between `count` knots, the first at `begin`, `density` of them per unit of x.
 * `below` up to `begin`, `above` from `end` on. A knot has its value in the lower half, and in the upper half the next
 * one's less it, in units of `unit`: one read for both. */
typedef struct {
    const int32_t *knots;
    float unit, last, begin, density, end, below, above;
} table;

/* The function whose codes are one exact bit. */
enum { TABLE, RELU, LEAKY_RELU, HARDTANH }; /* of the last, the table's begin and end are its limits */

static const int64_t NOT_A_NUMBER = INT64_MIN; /* in place of a seed: x had a NaN */

INLINE int has_nan(const float *x, int size) {
    int found = 0;
    for (int i = 0; i < size; i++) found |= x[i] != x[i];
    return found;
}

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

/* The knots with LANES numbers. */
INLINE ints find_knots(const int32_t *knots, ints number) {
#if LANES == 16
    return (ints)_mm512_i32gather_epi32((__m512i)number, knots, 4);
#elif LANES == 8
    return (ints)_mm256_i32gather_epi32(knots, (__m256i)number, 4);
#else
    ints found;
    for (int i = 0; i < LANES; i++) found[i] = knots[number[i]];
    return found;
#endif
}

/* Codes plus 1 of a part of a group. */
INLINE ints part_codes(lanes v, const table *t, ints chance) {
    lanes at = (v - t->begin) * t->density;
    at = MIN(MAX(at, all(0)), all(t->last)); /* a NaN becomes 0 */
    ints number = TRUNCATE(at);
    ints knot = find_knots(t->knots, number);
    lanes left = __builtin_convertvector(knot & 0xFFFF, lanes), slope = __builtin_convertvector(knot >> 16, lanes);
    lanes steps = (left + (at - __builtin_convertvector(number, lanes)) * slope) * t->unit;
    ints is_inside = v > all(t->begin), is_above = v >= all(t->end);
    steps = PICK(is_inside, steps, all(t->below));
    steps = PICK(is_above, all(t->above), steps);
    return TRUNCATE(steps + (lanes)chance); /* chance: 1 + u */
}

/* The codes of 64 elements, joined. */
INLINE void code_whole_group(const float *x, int bits, const table *t, int32_t a, const int32_t *c, uint8_t *to) {
    if (8 * bits < LANES) {
        uint8_t q[GROUP];
        for (int k = 0; k < PARTS; k++)
            store_bytes(q + k * LANES, part_codes(LOAD(x + k * LANES), t, LOAD_INTS(c + k * LANES) ^ a) - 1);
        join(q, GROUP, bits, to);
        return;
    }
    int joined = 8 / bits, places = PARTS / joined, ones = 255 / ((1 << bits) - 1);
    for (int k = 0; k < places; k++) {
        ints byte = {0};
        for (int j = 0; j < joined; j++) {
            int at = (k + j * places) * LANES;
            byte += part_codes(LOAD(x + at), t, LOAD_INTS(c + at) ^ a) << (j * bits);
        }
        store_bytes(to + k * LANES, byte - ones);
    }
}

/* The codes of 64 elements that are one exact bit, and what their function makes of them: out, or null. begin of
 * LEAKY_RELU: the slope. NaN stays what it is. */
INLINE void code_exact_group(const float *x, int kind, const table *t, uint8_t *to, float *out) {
    lanes begin = all(t->begin), end = all(t->end), zero = all(0);
    ints q[PARTS];
    for (int k = 0; k < PARTS; k++) {
        lanes v = LOAD(x + k * LANES), made;
        if (kind == RELU) {
            ints is_none = v <= zero, is_below = v < zero; /* PyTorch leaves -0 alone */
            q[k] = is_none + 1, made = (lanes)((ints)v & ~is_below);
        } else if (kind == LEAKY_RELU) {
            ints is_whole = v > zero;
            q[k] = -is_whole, made = PICK(is_whole, v, v * begin);
        } else {
            ints is_below = v < begin, is_above = v > end, is_inside = (v > begin) & (v < end);
            q[k] = -is_inside, made = PICK(is_below, begin, v);
            made = PICK(is_above, end, made);
        }
        if (out) STORE(out + k * LANES, made);
    }
    join_plane(q, 0, 1, to);
}

INLINE void code_group(
    const float *x, int size, int bits, const table *t, int32_t a, const int32_t *c, uint8_t *to) {
    if (size == GROUP) {
        code_whole_group(x, bits, t, a, c, to);
        return;
    }
    uint8_t q[GROUP];
    float padded[GROUP] = {0};
    int32_t words[GROUP] = {0};
    memcpy(padded, x, size * sizeof(float));
    memcpy(words, c, size * sizeof(int32_t));
    for (int k = 0; k < PARTS; k++)
        store_bytes(q + k * LANES, part_codes(LOAD(padded + k * LANES), t, LOAD_INTS(words + k * LANES) ^ a) - 1);
    join(q, size, bits, to);
}

/* Returns whether x has a NaN; 0 for functions without a table. out: contiguous, for what these make of x; or null. */
INLINE int pack_derivative_row(
    const void *x, int type, int64_t place, int64_t columns, int kind, int bits, const table *t, int32_t a,
    const int32_t *c, uint8_t *to, void *out, int64_t row) {
    float buffer[GROUP], made[GROUP];
    int64_t at = 0;
    int found = 0;
    for (; at + GROUP <= columns; at += GROUP) {
        const float *from = widened(x, type, place + at, GROUP, buffer);
        if (kind == TABLE) {
            code_group(from, GROUP, bits, t, a, c + at, to + at / 8 * bits);
            found |= has_nan(from, GROUP);
            continue;
        }
        float *values = !out ? NULL : type == FLOAT32 ? (float *)out + row * columns + at : made;
        code_exact_group(from, kind, t, to + at / 8, values);
        if (out && type != FLOAT32) narrow(made, type, GROUP, out, row * columns + at);
    }
    int left = (int)(columns - at);
    if (left) {
        const float *from = widened(x, type, place + at, left, buffer);
        if (kind == TABLE) {
            code_group(from, left, bits, t, a, c + at, to + at / 8 * bits);
            return found | has_nan(from, left);
        }
        uint8_t codes[GROUP / 8], q[GROUP]; /* of a whole group, in which bits have other places */
        float padded[GROUP] = {0};
        memcpy(padded, from, left * sizeof(float));
        code_exact_group(padded, kind, t, codes, out ? made : NULL);
        split(codes, GROUP, 1, q);
        join(q, left, 1, to + at / 8);
        if (out) narrow(made, type, left, out, row * columns + at);
    }
    return found;
}

static int pack_derivative_rows(
    const void *x, int type, int64_t stride, int64_t begin, int64_t end, int64_t columns, const int64_t *index, int kind,
    int bits, const table *t, const int32_t *a, const int32_t *c, uint8_t *codes, void *out) {
    int64_t length = (columns * bits + 7) / 8;
    int found = 0;
    for (int64_t row = begin; row < end; row++) {
        int64_t from = (index ? index[row] : row) * stride;
        uint8_t *to = codes + row * length;
        /* kind and bits are constants in each call, so that the compiler specializes it. */
        if (kind == RELU) pack_derivative_row(x, type, from, columns, RELU, 1, t, 0, c, to, out, row);
        else if (kind == LEAKY_RELU) pack_derivative_row(x, type, from, columns, LEAKY_RELU, 1, t, 0, c, to, out, row);
        else if (kind == HARDTANH) pack_derivative_row(x, type, from, columns, HARDTANH, 1, t, 0, c, to, out, row);
        else if (bits == 4) found |= pack_derivative_row(x, type, from, columns, TABLE, 4, t, a[row], c, to, NULL, row);
        else if (bits == 2) found |= pack_derivative_row(x, type, from, columns, TABLE, 2, t, a[row], c, to, NULL, row);
        else if (bits == 1) found |= pack_derivative_row(x, type, from, columns, TABLE, 1, t, a[row], c, to, NULL, row);
        else found |= pack_derivative_row(x, type, from, columns, TABLE, 8, t, a[row], c, to, NULL, row);
    }
    return found;
}

/* base: the factor of dY for code 0, plus 3/2 of a step: a code is too low by ½, and the noise is 1 + u. */
INLINE void apply_group(
    const float *y, int size, int bits, const uint8_t *from, float base, float step, int32_t a, const int32_t *c,
    float *out) {
    if (size == GROUP && 8 * bits >= LANES) {
        int joined = 8 / bits, places = PARTS / joined;
        for (int k = 0; k < places; k++) {
            ints wide = load_bytes(from + k * LANES);
            for (int j = 0; j < joined; j++) {
                int at = (k + j * places) * LANES;
                ints code = (wide >> (j * bits)) & ((1 << bits) - 1);
                lanes noise = (lanes)(LOAD_INTS(c + at) ^ a);
                STORE(out + at, LOAD(y + at) * (base + step * (__builtin_convertvector(code, lanes) - noise)));
            }
        }
        return;
    }
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
    if (size == GROUP) {
        ints is_kept[PARTS] = {{0}};
        split_plane(from, 0, 1, is_kept);
        for (int k = 0; k < PARTS; k++) {
            lanes v = LOAD(y + k * LANES), other = kind == LEAKY_RELU ? v * slope : all(0);
            STORE(out + k * LANES, PICK(-is_kept[k], v, other));
        }
        return;
    }
    split(from, size, 1, q);
    if (kind != LEAKY_RELU)
        for (int i = 0; i < size; i++) out[i] = q[i] ? y[i] : 0;
    else
        for (int i = 0; i < size; i++) out[i] = y[i] * (q[i] ? 1 : slope);
}

INLINE void apply_derivative_row(
    const void *y, int type, int64_t place, int64_t columns, int kind, int bits, const uint8_t *from, float low,
    float step, int32_t a, const int32_t *c, void *out) {
    float buffer[GROUP], made[GROUP];
    for (int64_t at = 0; at < columns; at += GROUP) {
        int count = columns - at < GROUP ? (int)(columns - at) : GROUP;
        const float *dy = widened(y, type, place + at, count, buffer);
        const uint8_t *codes = from + at / 8 * bits;
        float *to = type == FLOAT32 ? (float *)out + place + at : made;
        /* 64 is a constant in its own calls, so that the compiler vectorizes them. */
        if (kind == TABLE && count == GROUP) apply_group(dy, GROUP, bits, codes, low + 1.5f * step, step, a, c + at, to);
        else if (kind == TABLE) apply_group(dy, count, bits, codes, low + 1.5f * step, step, a, c + at, to);
        else if (count == GROUP) apply_exact_group(dy, GROUP, codes, kind, low, to);
        else apply_exact_group(dy, count, codes, kind, low, to);
        if (type != FLOAT32) narrow(made, type, count, out, place + at);
    }
}

static void apply_derivative_rows(
    const void *y, int type, const uint8_t *codes, int64_t begin, int64_t end, int64_t columns, const int64_t *index,
    int kind, int bits, float low, float step, const int32_t *a, const int32_t *c, void *out) {
    int64_t length = (columns * bits + 7) / 8;
    for (int64_t row = begin; row < end; row++) {
        int64_t at = (index ? index[row] : row) * columns;
        const uint8_t *from = codes + row * length;
        if (kind == RELU || kind == HARDTANH) apply_derivative_row(y, type, at, columns, RELU, 1, from, 0, 0, 0, c, out);
        else if (kind == LEAKY_RELU) apply_derivative_row(y, type, at, columns, LEAKY_RELU, 1, from, low, 0, 0, c, out);
        else if (bits == 4) apply_derivative_row(y, type, at, columns, TABLE, 4, from, low, step, a[row], c, out);
        else if (bits == 2) apply_derivative_row(y, type, at, columns, TABLE, 2, from, low, step, a[row], c, out);
        else if (bits == 1) apply_derivative_row(y, type, at, columns, TABLE, 1, from, low, step, a[row], c, out);
        else apply_derivative_row(y, type, at, columns, TABLE, 8, from, low, step, a[row], c, out);
    }
}

/* x: of a type, `stride` elements from one row to the next. index: `rows` rows of it, or
 * null. knots: `count`, or null for a kind without a table, whose seed is null too. seed: becomes NOT_A_NUMBER if these
 * rows have one. codes: contiguous. out: for the values of a function without a table, contiguous, of the type; or null,
 * as with an index. Returns 0, or 2 if memory could not be allocated. */
int V(rmm_pack_derivative)(
    const void *x, int type, int64_t stride, int64_t rows, int64_t columns, const int64_t *index, int kind, int bits,
    const int32_t *knots, int64_t count, float unit, float begin, float density, float end, float below, float above,
    int64_t *seed, uint8_t *codes, void *out, int threads) {
    table t = {knots, unit, (float)(count - 1) * (1 - 0x1p-22f), begin, density, end, below, above};
    noise n;
    int found = 0;
    if (!begin_noise(&n, seed ? *seed : 0, 0, kind == TABLE ? rows : 0, kind == TABLE ? columns : 0)) return 2;
#pragma omp parallel num_threads(threads) reduction(| : found)
    found |= pack_derivative_rows(
        x, type, stride, SHARE(rows), columns, index, kind, bits, &t, n.rows, n.columns, codes, out);
    if (found && seed) *seed = NOT_A_NUMBER;
    end_noise(&n);
    return 0;
}

/* y, out: of a type, contiguous, as codes. low: the slope if kind is LEAKY_RELU. Rows of
 * `out` that are not in `index` are left as they are. Returns 0, or 2 if memory could not be allocated. */
int V(rmm_apply_derivative)(
    const void *y, int type, const uint8_t *codes, int64_t rows, int64_t columns, const int64_t *index, int kind,
    int bits, float low, float step, int64_t seed, void *out, int threads) {
    noise n;
    if (!begin_noise(&n, seed, 0, kind == TABLE ? rows : 0, kind == TABLE ? columns : 0)) return 2;
#pragma omp parallel num_threads(threads)
    apply_derivative_rows(y, type, codes, SHARE(rows), columns, index, kind, bits, low, step, n.rows, n.columns, out);
    end_noise(&n);
    return 0;
}
