/* Rotation, rounding and codes of one group of 64 columns, in registers: what packs and unpacks rows is made of. */

#define GROUP 64
#define PARTS (GROUP / LANES)

/* Replaces v, of `parts` vectors, by √n H v, with the orthonormal Hadamard matrix H of its n elements. */
INLINE void rotate_parts(lanes *v, int parts) {
    lanes sign_1 = alternating(1), sign_2 = alternating(2);
    for (int k = 0; k < parts; k++) {
        v[k] = MULTIPLY_ADD(v[k], sign_1, SWAP_1(v[k]));
        v[k] = MULTIPLY_ADD(v[k], sign_2, SWAP_2(v[k]));
#if LANES >= 8
        v[k] = MULTIPLY_ADD(v[k], alternating(4), SWAP_4(v[k]));
#endif
#if LANES >= 16
        v[k] = MULTIPLY_ADD(v[k], alternating(8), SWAP_8(v[k]));
#endif
    }
    for (int h = 1; h < parts; h *= 2)
        for (int k = 0; k < parts; k++)
            if (!(k & h)) {
                lanes sum = v[k] + v[k + h];
                v[k + h] = v[k] - v[k + h], v[k] = sum;
            }
}

INLINE void rotate(lanes v[PARTS]) { rotate_parts(v, PARTS); }

/* Signs of the rotation times the 1/8 that `rotate` leaves out. */
INLINE void load_signs(const float *signs, lanes to[PARTS]) {
    for (int k = 0; k < PARTS; k++) to[k] = LOAD(signs + k * LANES) * 0.125f;
}

/* Some groups of a row, at most one for each lane: their scales are found together. */
typedef struct {
    float rotated[LANES * GROUP];
    ints top[LANES]; /* the bits of absolute values, whose order is theirs; those of a NaN are the largest */
    int count;
} batch;

INLINE void begin_batch(batch *b) { b->count = 0; }

/* Rotates a group, which is multiplied by `load_signs` already, and adds it. */
INLINE void add_group(batch *b, lanes v[PARTS]) {
    rotate(v);
    ints top = {0};
    for (int k = 0; k < PARTS; k++) {
        STORE(b->rotated + b->count * GROUP + k * LANES, v[k]);
        top = MAX_INTS(top, (ints)v[k] & 0x7FFFFFFF);
    }
    b->top[b->count++] = top;
}

/* Lane i of the result is the maximum of v[i]. */
INLINE ints highest_of_each(ints v[LANES]) {
#define HALVE(h)                                \
    for (int i = 0; i < LANES; i += 2 * h)      \
        v[i] = MAX_INTS(BLEND_##h(v[i], v[i + h]), CROSS_##h(v[i], v[i + h]));
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

/* The largest code, which stands for the most, by that for 0. */
INLINE float middle_of(int bits) { return ((1 << bits) - 1) * 0.5f; }

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The mantissa of 2^(k / 8). */
static const uint32_t eighths[8] = {0, 0x0B95C2, 0x1837F0, 0x25FED7, 0x3504F3, 0x45672A, 0x5744FD, 0x6AC0C7};

/* The scale that a byte stands for, as scales_of in rmm_linear/packing/rounding.py describes. */
INLINE float scale_of(int byte) {
    if (byte >= 9 && byte < 249) return as_float((uint32_t)((byte - 9) / 8 + 109) << 23 | eighths[(byte - 9) % 8]);
    if (byte == 0 || byte == 255) return byte ? NAN : 0;
    return as_float((uint32_t)(127 + (byte < 9 ? 4 * byte - 54 : 4 * byte - 984)) << 23);
}

/* The byte of the least scale that is not below a number, which is not negative. */
INLINE int scale_byte(float least) {
    uint32_t bits;
    memcpy(&bits, &least, 4);
    int exponent = (int)(bits >> 23) - 127, steps = 0;
    uint32_t mantissa = bits & 0x7FFFFF;
    if (!bits) return 0;
    int octave = exponent + (mantissa > 0); /* rounded up */
    if (exponent < -18) {
        int byte = 9 - ((-18 - octave) >> 2);
        return byte < 1 ? 1 : byte;
    }
    if (exponent >= 12) {
        int byte = 249 + ((octave - 9) >> 2);
        return byte > 254 ? 255 : byte;
    }
    for (int k = 0; k < 8; k++) steps += mantissa > eighths[k];
    return 9 + 8 * (exponent + 18) + steps;
}

/* The factor of the largest absolute value of a group that gives the least scale: rounded sums stay below the last code. */
INLINE float share_of(int bits) { return (float)((1 + 0x1p-18) / (((1 << bits) - 1) * 0.5)); }

INLINE float inverse_of(float scale) { return scale == 0 ? 0 : 1 / scale; }

/* The bits of 1 + u of rows a and columns c, or for `mixed` of their hash: see RoundingNoise in packing/rounding.py. */
INLINE ints chances(ints c, int32_t a, int mixed) {
    ints words = c ^ a;
    if (!mixed) return words;
    uints hash = (uints)(words & 0x7FFFFF) * 0x9E3779B1u;
    hash = (hash ^ hash >> 15) * 0x85EBCA6Bu;
    return (ints)(hash >> 9 | 0x3F800000u);
}

INLINE float chance_of(int32_t c, int32_t a, int mixed) {
    uint32_t words = (uint32_t)(c ^ a);
    if (!mixed) return as_float(words);
    words = (words & 0x7FFFFF) * 0x9E3779B1u;
    words = (words ^ words >> 15) * 0x85EBCA6Bu;
    return as_float(words >> 9 | 0x3F800000u);
}

/* Codes of a part plus 1: v / scale from the first code plus a random number in [1, 2), truncated; any number for NaN. */
INLINE ints round_part(lanes v, float middle, lanes inverse, ints chance) {
    return TRUNCATE(v * inverse + middle + (lanes)chance);
}

/* Bytes of the codes of `columns` columns. */
INLINE int64_t code_bytes(int64_t columns, int bits) {
    return bits == 3 ? (columns * 2 + 7) / 8 + (columns + 7) / 8 : (columns * bits + 7) / 8;
}

/* Writes `width` bits of the codes of a group, from bit `low` on: byte i holds those of the elements i, i + h, …, where h is
 * the number of bytes. */
INLINE void join_plane(const ints codes[PARTS], int low, int width, uint8_t *to) {
    int mask = (1 << width) - 1;
#if LANES == 16
    if (width == 1) {
        ints byte = {0};
        uint8_t twice[LANES];
        for (int k = 0; k < PARTS; k++) byte += ((codes[k] >> low) & mask) << (2 * k);
        store_bytes(twice, byte + (SWAP_8(byte) << 1)); /* of which the first half is meant */
        memcpy(to, twice, LANES / 2);
        return;
    }
#endif
    int joined = 8 / width, places = PARTS / joined;
    for (int k = 0; k < places; k++) {
        ints byte = {0};
        for (int j = 0; j < joined; j++) byte += ((codes[k + j * places] >> low) & mask) << (j * width);
        store_bytes(to + k * LANES, byte);
    }
}

/* Adds to codes what `join_plane` wrote. */
INLINE void split_plane(const uint8_t *from, int low, int width, ints codes[PARTS]) {
    int mask = (1 << width) - 1;
#if LANES == 16
    if (width == 1) {
        uint8_t twice[LANES];
        ints half;
        for (int i = 0; i < LANES; i++) half[i] = i / 8;
        memcpy(twice, from, LANES / 2), memcpy(twice + LANES / 2, from, LANES / 2);
        ints bytes = load_bytes(twice) >> half;
        for (int k = 0; k < PARTS; k++) codes[k] += ((bytes >> (2 * k)) & mask) << low;
        return;
    }
#endif
    int joined = 8 / width, places = PARTS / joined;
    for (int k = 0; k < places; k++) {
        ints bytes = load_bytes(from + k * LANES);
        for (int j = 0; j < joined; j++) codes[k + j * places] += ((bytes >> (j * width)) & mask) << low;
    }
}

/* Writes the codes and scales of a batch, of rows that have `each` groups in it. a: of every row. */
INLINE void finish_batch_of(
    batch *b, int bits, int mixed, const int32_t *a, int each, const int32_t *c, uint8_t *codes, uint8_t *scales) {
    for (int i = b->count; i < LANES; i++) b->top[i] = (ints){0};
    lanes least = (lanes)highest_of_each(b->top) * share_of(bits);
    float middle = middle_of(bits);
    int32_t word = *a;
    for (int group = 0, place = 0; group < b->count; group++, place++) {
        if (place == each) place = 0, word = *++a;
        const float *v = b->rotated + group * GROUP;
        const int32_t *group_c = c + place * GROUP;
        uint8_t *to = codes + group * 8 * bits;
        scales[group] = (uint8_t)scale_byte(least[group]);
        lanes inverse = all(inverse_of(scale_of(scales[group])));
        ints found[PARTS];
        for (int k = 0; k < PARTS; k++)
            found[k] = round_part(LOAD(v + k * LANES), middle, inverse, chances(LOAD_INTS(group_c + k * LANES), word, mixed)) - 1;
        join_plane(found, 0, bits == 3 ? 2 : bits, to);
        if (bits == 3) join_plane(found, 2, 1, to + 16);
    }
}

static __attribute__((noinline)) void finish_batch(
    batch *b, int bits, int mixed, const int32_t *a, int each, const int32_t *c, uint8_t *codes, uint8_t *scales) {
    /* bits, mixed and -1, for the groups of one row, are constants in each call, so that the compiler specializes it. */
    if (!mixed && each < LANES && bits == 3) finish_batch_of(b, 3, 0, a, each, c, codes, scales);
    else if (!mixed && each < LANES) finish_batch_of(b, bits, 0, a, each, c, codes, scales);
    else if (mixed && bits == 2) finish_batch_of(b, 2, 1, a, -1, c, codes, scales);
    else if (mixed) finish_batch_of(b, bits, 1, a, -1, c, codes, scales);
    else if (bits == 4) finish_batch_of(b, 4, 0, a, -1, c, codes, scales);
    else if (bits == 3) finish_batch_of(b, 3, 0, a, -1, c, codes, scales);
    else if (bits == 2) finish_batch_of(b, 2, 0, a, -1, c, codes, scales);
    else finish_batch_of(b, 8, 0, a, -1, c, codes, scales);
}

/* The last group, if it has fewer columns. It is not rotated. */
static __attribute__((noinline)) void pack_short_group(
    const float *from, int size, int bits, int mixed, int32_t a, const int32_t *c, uint8_t *codes, uint8_t *scales) {
    int32_t top = 0;
    for (int i = 0; i < size; i++) {
        int32_t word;
        memcpy(&word, from + i, 4);
        word &= 0x7FFFFFFF;
        top = word > top ? word : top;
    }
    scales[0] = (uint8_t)scale_byte(as_float((uint32_t)top) * share_of(bits));
    float inverse = inverse_of(scale_of(scales[0])), middle = middle_of(bits);
    memset(codes, 0, code_bytes(size, bits));
    for (int low = 0, width = bits == 3 ? 2 : bits; low < bits; low += width, width = bits - low) {
        int length = (size * width + 7) / 8;
        for (int i = 0; i < size; i++) {
            float above = from[i] * inverse + middle + chance_of(c[i], a, mixed);
            int32_t code = (int32_t)(above >= 1 ? above : 1) - 1;
            codes[i % length] |= (uint8_t)((code >> low & ((1 << width) - 1)) << i / length * width);
        }
        codes += length;
    }
}

/* Unpacks a whole group, still rotated. The element with a code is scale · (code − middle + ½ − u); a xor c holds the bits
 * of 1 + u, u the number that was added before it was rounded. */
INLINE void unpack_group(
    int bits, int mixed, const uint8_t *codes, int32_t a, const int32_t *c, const uint8_t *scales, lanes v[PARTS]) {
    float scale = scale_of(scales[0]), middle = middle_of(bits);
    ints found[PARTS] = {0};
    split_plane(codes, 0, bits == 3 ? 2 : bits, found);
    if (bits == 3) split_plane(codes + 16, 2, 1, found);
    for (int k = 0; k < PARTS; k++) {
        lanes chance = (lanes)chances(LOAD_INTS(c + k * LANES), a, mixed);
        v[k] = (__builtin_convertvector(found[k], lanes) - middle - (chance - 1.5f)) * scale;
    }
}

/* The last group, if it has fewer columns. */
static __attribute__((noinline)) void unpack_short_group(
    int size, int bits, int mixed, const uint8_t *codes, int32_t a, const int32_t *c, const uint8_t *scales, float *to) {
    float scale = scale_of(scales[0]), middle = middle_of(bits);
    int first = bits == 3 ? 2 : bits, length = (size * first + 7) / 8, second = (size + 7) / 8;
    for (int i = 0; i < size; i++) {
        int code = codes[i % length] >> i / length * first & ((1 << first) - 1);
        if (bits == 3) code |= (codes[length + i % second] >> i / second & 1) << 2;
        to[i] = ((float)code - middle - (chance_of(c[i], a, mixed) - 1.5f)) * scale;
    }
}
