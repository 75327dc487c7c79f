/* Max pooling in two dimensions with the position of each maximum in its window in few bits: packing/pooling.py in
 * compiled form. Positions are in the order of the output's memory, as bit planes. */

/* Sizes of planes, outputs and window, and whether the channels of a place lie side by side in memory. */
typedef struct {
    int64_t samples, channels, height, width, out_height, out_width;
    int64_t kernel[2], stride[2], padding[2], dilation[2], is_last;
} pool;

/* The first step of a window that lies in the plane. */
INLINE int64_t first_step(int64_t corner, int64_t dilation) { return corner < 0 ? (-corner + dilation - 1) / dilation : 0; }

/* The step after the last one that does. */
INLINE int64_t end_step(int64_t corner, int64_t dilation, int64_t kernel, int64_t size) {
    int64_t end = (size - corner + dilation - 1) / dilation;
    return end < kernel ? end : kernel;
}

/* Takes numbers that are above the greatest so far, or NaN; `step` numbers from one to the next. */
INLINE void take_greater(
    const float *x, int64_t step, int64_t begin, int64_t end, int32_t position, float *best, int32_t *places) {
    for (int64_t i = begin; i < end; i++) {
        float v = x[i * step];
        int take = (v > best[i]) | (v != v);
        best[i] = take ? v : best[i], places[i] = take ? position : places[i];
    }
}

/* A row of outputs of a plane. best, places: out_width. */
static void pool_row(const float *plane, const pool *s, int64_t y, float *best, int32_t *places) {
    int64_t top = y * s->stride[0] - s->padding[0], step = s->stride[1];
    int64_t begin = first_step(top, s->dilation[0]), end = end_step(top, s->dilation[0], s->kernel[0], s->height);
    for (int64_t i = 0; i < s->out_width; i++) {
        best[i] = -INFINITY;
        places[i] = (int32_t)(begin * s->kernel[1] + first_step(i * step - s->padding[1], s->dilation[1]));
    }
    for (int64_t k = begin; k < end; k++)
        for (int64_t j = 0; j < s->kernel[1]; j++) {
            int64_t shift = j * s->dilation[1] - s->padding[1];
            int64_t from = shift < 0 ? (-shift + step - 1) / step : 0, to = (s->width - 1 - shift) / step + 1;
            const float *x = plane + (top + k * s->dilation[0]) * s->width + shift;
            int32_t position = (int32_t)(k * s->kernel[1] + j);
            if (s->width - 1 - shift < 0) continue;
            to = to < s->out_width ? to : s->out_width;
            /* The step is a constant in each call, so that the compiler vectorizes it. */
            if (step == 1) take_greater(x, 1, from, to, position, best, places);
            else if (step == 2) take_greater(x, 2, from, to, position, best, places);
            else take_greater(x, step, from, to, position, best, places);
        }
}

/* All channels of one place. best, places: channels. */
static void pool_place(const float *sample, const pool *s, int64_t y, int64_t x, float *best, int32_t *places) {
    int64_t top = y * s->stride[0] - s->padding[0], left = x * s->stride[1] - s->padding[1];
    int64_t begin = first_step(top, s->dilation[0]), end = end_step(top, s->dilation[0], s->kernel[0], s->height);
    int64_t first = first_step(left, s->dilation[1]), last = end_step(left, s->dilation[1], s->kernel[1], s->width);
    for (int64_t i = 0; i < s->channels; i++)
        best[i] = -INFINITY, places[i] = (int32_t)(begin * s->kernel[1] + first);
    for (int64_t k = begin; k < end; k++)
        for (int64_t j = first; j < last; j++) {
            int64_t place = (top + k * s->dilation[0]) * s->width + left + j * s->dilation[1];
            take_greater(
                sample + place * s->channels, 1, 0, s->channels, (int32_t)(k * s->kernel[1] + j), best, places);
        }
}

/* Bits of 8 bytes of 0 or 1, the first the lowest; and the reverse. */
INLINE uint8_t joined_bits(const uint8_t *from, int bit) {
    uint8_t byte = 0;
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t word;
    memcpy(&word, from, 8);
    byte = (uint8_t)((word >> bit & UINT64_C(0x0101010101010101)) * UINT64_C(0x0102040810204080) >> 56);
#else
    for (int i = 0; i < 8; i++) byte |= (from[i] >> bit & 1) << i;
#endif
    return byte;
}

INLINE void add_split_bits(uint8_t byte, int bit, uint8_t *to) {
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    uint64_t word, spread = (byte * UINT64_C(0x0101010101010101)) & UINT64_C(0x8040201008040201);
    spread = ((spread + UINT64_C(0x7F7F7F7F7F7F7F7F)) | spread) >> 7 & UINT64_C(0x0101010101010101);
    memcpy(&word, to, 8);
    word |= spread << bit;
    memcpy(to, &word, 8);
#else
    for (int i = 0; i < 8; i++) to[i] |= (byte >> i & 1) << bit;
#endif
}

static void pool_rows(const float *x, const pool *s, int64_t begin, int64_t end, float *out, uint8_t *found, float *work) {
    int64_t area = s->height * s->width, outputs = s->out_height * s->out_width;
    for (int64_t row = begin; row < end; row++) { /* of a plane, or of all planes of a sample */
        int64_t which = row / s->out_height, y = row % s->out_height;
        if (!s->is_last) {
            int64_t at = which * outputs + y * s->out_width;
            int32_t *places = (int32_t *)work;
            pool_row(x + which * area, s, y, out + at, places);
            for (int64_t i = 0; i < s->out_width; i++) found[at + i] = (uint8_t)places[i];
            continue;
        }
        int32_t *places = (int32_t *)work;
        for (int64_t i = 0; i < s->out_width; i++) {
            int64_t at = (which * outputs + y * s->out_width + i) * s->channels;
            pool_place(x + which * area * s->channels, s, y, i, out + at, places);
            for (int64_t c = 0; c < s->channels; c++) found[at + c] = (uint8_t)places[c];
        }
    }
}

/* Adds dY to the elements that were the greatest, in the order of outputs. offsets: of the elements of a window. */
static void spread_planes(
    const float *dy, const pool *s, int64_t begin, int64_t end, const uint8_t *found, const int64_t *offsets, float *dx) {
    int64_t area = s->height * s->width, outputs = s->out_height * s->out_width;
    int64_t together = s->is_last ? s->channels : 1; /* planes of an item, whose numbers take turns */
    for (int64_t item = begin; item < end; item++) {
        float *to = dx + item * area * together;
        const float *from = dy + item * outputs * together;
        const uint8_t *places = found + item * outputs * together;
        memset(to, 0, area * together * sizeof(float));
        for (int64_t y = 0; y < s->out_height; y++)
            for (int64_t x = 0; x < s->out_width; x++) {
                int64_t corner = (y * s->stride[0] - s->padding[0]) * s->width + x * s->stride[1] - s->padding[1];
                int64_t at = (y * s->out_width + x) * together;
                for (int64_t c = at; c < at + together; c++)
                    to[(corner + offsets[places[c]]) * together + c - at] += from[c];
            }
    }
}

/* x: float32, of samples · channels planes, channels last if `is_last`. sizes: a `pool`. out: as x. stored: `bits` rows of
 * bits. Returns 0, or 2 if memory could not be allocated. */
int V(rmm_max_pool)(const float *x, const int64_t *sizes, int bits, float *out, uint8_t *stored, int threads) {
    pool s;
    memcpy(&s, sizes, sizeof(pool));
    int64_t outputs = s.out_height * s.out_width, count = s.samples * s.channels * outputs, bytes = (count + 7) / 8;
    int64_t each = s.is_last ? s.channels : s.out_width;
    uint8_t *found = calloc(8 * bytes + 8 + threads * each * sizeof(float), 1);
    if (!found) return 2;
#pragma omp parallel num_threads(threads)
    {
        float *work = (float *)(found + 8 * bytes) + omp_get_thread_num() * each;
        pool_rows(x, &s, SHARE(s.samples * (s.is_last ? 1 : s.channels) * s.out_height), out, found, work);
    }
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < bytes; i++)
        for (int bit = 0; bit < bits; bit++) stored[bit * bytes + i] = joined_bits(found + 8 * i, bit);
    free(found);
    return 0;
}

/* The reverse: dx, as x, of dy, as out. */
int V(rmm_max_pool_backward)(
    const float *dy, const int64_t *sizes, int bits, const uint8_t *stored, float *dx, int threads) {
    pool s;
    memcpy(&s, sizes, sizeof(pool));
    int64_t outputs = s.out_height * s.out_width, count = s.samples * s.channels * outputs, bytes = (count + 7) / 8;
    int64_t window = s.kernel[0] * s.kernel[1], most = (int64_t)1 << bits;
    uint8_t *found = calloc(8 * bytes + most * sizeof(int64_t), 1);
    if (!found) return 2;
    int64_t *offsets = (int64_t *)(found + 8 * bytes);
    for (int64_t i = 0; i < window; i++)
        offsets[i] = i / s.kernel[1] * s.dilation[0] * s.width + i % s.kernel[1] * s.dilation[1];
#pragma omp parallel for num_threads(threads)
    for (int64_t i = 0; i < bytes; i++)
        for (int bit = 0; bit < bits; bit++) add_split_bits(stored[bit * bytes + i], bit, found + 8 * i);
#pragma omp parallel num_threads(threads)
    spread_planes(dy, &s, SHARE(s.samples * (s.is_last ? 1 : s.channels)), found, offsets, dx);
    free(found);
    return 0;
}
