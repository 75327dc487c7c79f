/* Rotation, rounding and codes of one group of 64 columns, in registers: what packs and unpacks rows is made of. */

#define GROUP 64
#define PARTS (GROUP / LANES)

/* Replaces v by 8 H v, with the orthonormal Hadamard matrix H. */
INLINE void rotate(lanes v[PARTS]) {
    lanes sign_1 = alternating(1), sign_2 = alternating(2);
    for (int k = 0; k < PARTS; k++) {
        v[k] = MULTIPLY_ADD(v[k], sign_1, SWAP_1(v[k]));
        v[k] = MULTIPLY_ADD(v[k], sign_2, SWAP_2(v[k]));
#if LANES >= 8
        v[k] = MULTIPLY_ADD(v[k], alternating(4), SWAP_4(v[k]));
#endif
#if LANES >= 16
        v[k] = MULTIPLY_ADD(v[k], alternating(8), SWAP_8(v[k]));
#endif
    }
    for (int h = 1; h < PARTS; h *= 2)
        for (int k = 0; k < PARTS; k++)
            if (!(k & h)) {
                lanes sum = v[k] + v[k + h];
                v[k + h] = v[k] - v[k + h], v[k] = sum;
            }
}

/* Signs of the rotation times the 1/8 that `rotate` leaves out. */
INLINE void load_signs(const float *signs, lanes to[PARTS]) {
    for (int k = 0; k < PARTS; k++) to[k] = LOAD(signs + k * LANES) * 0.125f;
}

/* Some groups of a row, at most one for each lane: their ranges are found together. */
typedef struct {
    float rotated[LANES * GROUP];
    lanes low[LANES], high[LANES], sum[LANES]; /* a sum is NaN where an element is; a minimum need not be */
    int count;
} batch;

INLINE void begin_batch(batch *b) { b->count = 0; }

/* Rotates a group, which is multiplied by `load_signs` already, and adds it. */
INLINE void add_group(batch *b, lanes v[PARTS]) {
    rotate(v);
    lanes low = v[0], high = v[0], sum = v[0];
    STORE(b->rotated + b->count * GROUP, v[0]);
    for (int k = 1; k < PARTS; k++) {
        STORE(b->rotated + b->count * GROUP + k * LANES, v[k]);
        low = MIN(low, v[k]), high = MAX(high, v[k]), sum += v[k];
    }
    b->low[b->count] = low, b->high[b->count] = high, b->sum[b->count] = sum;
    b->count++;
}

/* Lane i of the result is the minimum of v[i]. */
INLINE lanes lowest_of_each(lanes v[LANES]) {
#define HALVE(h)                                \
    for (int i = 0; i < LANES; i += 2 * h)      \
        v[i] = MIN(BLEND_##h(v[i], v[i + h]), CROSS_##h(v[i], v[i + h]));
    HALVE(1)
    HALVE(2)
#if LANES >= 8
    HALVE(4)
#endif
#if LANES >= 16
    HALVE(8)
#endif
#undef HALVE
    return v[0];
}

/* The largest bfloat16 numbers that are not above float32 numbers. */
INLINE lanes round_down(lanes v) {
    ints bits = (ints)v;
    return (lanes)((bits + ((bits >> 31) & 0xFFFF)) & ~0xFFFF);
}

/* Offsets and scales of groups, and 1 / scale. */
typedef struct {
    lanes offset, scale, inverse;
} range;

INLINE range range_of(lanes low, lanes high, int bits) {
    float share = (float)((1 + 0x1p-18) / ((1 << bits) - 1));
    lanes offset = round_down(low), scale = -round_down((offset - high) * share);
    ints is_small = scale < 0x1p-126f;
    return (range){offset, scale, PICK(is_small, all(0), 1 / scale)};
}

/* Codes of a part plus 1: (v - offset) / scale plus a random number in [1, 2), truncated; any number for NaN. */
INLINE ints round_part(lanes v, lanes offset, lanes inverse, ints chance) {
    return TRUNCATE((v - offset) * inverse + (lanes)chance);
}

/* Writes the codes and qparams of a batch, and sets `not_finite` if a group has a NaN or is beyond float32. */
INLINE void finish_batch_of(
    batch *b, int bits, int32_t a, const int32_t *c, uint8_t *codes, uint16_t *qparams, int *not_finite) {
    for (int i = b->count; i < LANES; i++) b->low[i] = b->high[i] = all(0);
    for (int i = 0; i < LANES; i++) b->high[i] = -b->high[i];
    lanes low = lowest_of_each(b->low), high = -lowest_of_each(b->high);
    lanes sum = b->sum[0];
    for (int i = 1; i < b->count; i++) sum += b->sum[i];
    if (any_nan(sum))
        for (int i = 0; i < b->count; i++)
            for (int k = 0; k < PARTS; k++)
                if (any_nan(LOAD(b->rotated + i * GROUP + k * LANES))) low[i] = NAN;
    range r = range_of(low, high, bits);
    ints joined_qparams = (ints)((uints)r.offset >> 16) | ((ints)r.scale & ~0xFFFF);
    memcpy(qparams, &joined_qparams, b->count * 4);
    *not_finite |= any_nan(r.scale * 0.0f);
    int joined = 8 / bits, places = PARTS / joined; /* byte i holds the elements i, i + 64 / joined, … */
    int ones = 255 / ((1 << bits) - 1);             /* 1 in every code of a byte */
    for (int group = 0; group < b->count; group++) {
        const float *v = b->rotated + group * GROUP;
        const int32_t *chances = c + group * GROUP;
        lanes offset = all(r.offset[group]), inverse = all(r.inverse[group]);
        for (int k = 0; k < places; k++) {
            ints byte = {0};
            for (int j = 0; j < joined; j++) {
                int at = (k + j * places) * LANES;
                byte += round_part(LOAD(v + at), offset, inverse, LOAD_INTS(chances + at) ^ a) << (j * bits);
            }
            store_bytes(codes + group * 8 * bits + k * LANES, byte - ones);
        }
    }
}

static __attribute__((noinline)) void finish_batch(
    batch *b, int bits, int32_t a, const int32_t *c, uint8_t *codes, uint16_t *qparams, int *not_finite) {
    /* bits is a constant in each call, so that the compiler specializes it. */
    if (bits == 4) finish_batch_of(b, 4, a, c, codes, qparams, not_finite);
    else if (bits == 2) finish_batch_of(b, 2, a, c, codes, qparams, not_finite);
    else finish_batch_of(b, 8, a, c, codes, qparams, not_finite);
}

/* The last group, if it has fewer columns. It is not rotated. */
static __attribute__((noinline)) void pack_short_group(
    const float *from, int size, int bits, int32_t a, const int32_t *c, uint8_t *codes, uint16_t *qparams,
    int *not_finite) {
    float low = from[0], high = from[0], sum = 0;
    for (int i = 0; i < size; i++)
        low = from[i] < low ? from[i] : low, high = from[i] > high ? from[i] : high, sum += from[i];
    range r = range_of(all(sum == sum ? low : NAN), all(high), bits);
    float offset = r.offset[0], inverse = r.inverse[0];
    qparams[0] = bfloat16(offset), qparams[1] = bfloat16(r.scale[0]);
    *not_finite |= !(r.scale[0] * 0.0f == 0);
    int length = (size * bits + 7) / 8;
    memset(codes, 0, length);
    for (int i = 0; i < size; i++) {
        int32_t word = a ^ c[i];
        float chance;
        memcpy(&chance, &word, 4);
        float above = (from[i] - offset) * inverse + chance;
        int32_t code = (int32_t)(above >= 1 ? above : 1) - 1;
        codes[i % length] |= (uint8_t)(code << i / length * bits);
    }
}

/* Unpacks a whole group, still rotated. The element with a code is offset + scale · (code + ½ − u); a xor c holds the bits
 * of 1 + u, u the number that was added before it was rounded. */
INLINE void unpack_group(
    int bits, const uint8_t *codes, int32_t a, const int32_t *c, const uint16_t *qparams, lanes v[PARTS]) {
    float offset = from_bfloat16(qparams[0]), scale = from_bfloat16(qparams[1]);
    int joined = 8 / bits, places = PARTS / joined;
    for (int k = 0; k < places; k++) {
        ints wide = load_bytes(codes + k * LANES);
        for (int j = 0; j < joined; j++) {
            int part = k + j * places;
            ints code = (wide >> (j * bits)) & ((1 << bits) - 1);
            lanes chance = (lanes)(LOAD_INTS(c + part * LANES) ^ a);
            v[part] = (__builtin_convertvector(code, lanes) - (chance - 1.5f)) * scale + offset;
        }
    }
}

/* The last group, if it has fewer columns. */
static __attribute__((noinline)) void unpack_short_group(
    int size, int bits, const uint8_t *codes, int32_t a, const int32_t *c, const uint16_t *qparams, float *to) {
    float offset = from_bfloat16(qparams[0]), scale = from_bfloat16(qparams[1]);
    int length = (size * bits + 7) / 8;
    for (int i = 0; i < size; i++) {
        int32_t word = a ^ c[i];
        float chance;
        memcpy(&chance, &word, 4);
        to[i] = ((float)(codes[i % length] >> i / length * bits & ((1 << bits) - 1)) - (chance - 1.5f)) * scale + offset;
    }
}
