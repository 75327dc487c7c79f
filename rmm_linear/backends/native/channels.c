/* BatchNorm, GroupNorm and InstanceNorm from a packed copy of the normalized input: rmm_linear/packing/channel_norms.py in
 * compiled form. */

/* An input (samples, places, channels, length), of which places or length is 1, and the matrix that is packed of it. */
typedef struct {
    int64_t samples, places, channels, length, groups, rows, columns;
} shape;

/* Samples that have statistics of their own, as far as numbers are kept for channels: one for BatchNorm. */
INLINE int64_t apart(shape s) { return s.groups ? s.samples : 1; }

/* Elements that share their statistics, at least 1. */
INLINE double set_size(shape s) {
    int64_t all = s.places * s.channels * s.length, size = s.groups ? all / s.groups : s.samples * all / s.channels;
    return size ? (double)size : 1;
}

/* The number of the first channel of a row of the matrix among those that numbers are kept for. */
INLINE int64_t first_channel(shape s, int64_t row) {
    int64_t run = row * (s.columns / s.length), sample = run / (s.places * s.channels);
    return (s.groups ? sample * s.channels : 0) + run % s.channels;
}

/* Two sums over the elements of a channel. */
typedef struct {
    double one, other;
} pair;

/* Adds Σx and Σx² of a run of one channel: about the mean of its beginning, so that little cancels. */
static void add_run(const float *x, int64_t length, pair *to) {
    int64_t few = length < 4 * LANES ? length : 4 * LANES, i = 0;
    lanes sums[4] = {{0}}, products[4] = {{0}}, begin = {0};
    for (; i + LANES <= few; i += LANES) begin += LOAD(x + i);
    if (i < few) begin += load_some(x + i, (int)(few - i), 0);
    float mean = lanes_sum(begin) / few;
    i = 0;
    for (; i + 4 * LANES <= length; i += 4 * LANES)
        for (int k = 0; k < 4; k++) {
            lanes v = LOAD(x + i + k * LANES) - mean;
            sums[k] += v, products[k] += v * v;
        }
    for (; i < length; i += LANES) {
        lanes v = (i + LANES <= length ? (lanes)LOAD(x + i) : load_some(x + i, (int)(length - i), mean)) - mean;
        sums[0] += v, products[0] += v * v;
    }
    double rest = lanes_sum(sums[0] + sums[1] + (sums[2] + sums[3]));
    double squares = lanes_sum(products[0] + products[1] + (products[2] + products[3]));
    to->one += rest + (double)length * mean;
    to->other += squares + 2 * mean * rest + (double)length * mean * mean;
}

/* The same of rows whose elements are of one channel each. work: 3 * channels. */
static void add_columns(
    const void *x, int type, int64_t begin, int64_t end, int64_t channels, float *work, float *buffer, pair *to) {
    float *shift = work, *ones = work + channels, *squares = work + 2 * channels;
    int64_t few = end - begin < 16 ? end - begin : 16;
    for (int64_t i = 0; i < channels; i++) shift[i] = 0;
    for (int64_t row = begin; row < begin + few; row++) {
        const float *from = widened(x, type, row * channels, channels, buffer);
        for (int64_t i = 0; i < channels; i++) shift[i] += from[i] / few;
    }
    for (int64_t first = begin; first < end; first += BLOCK) {
        int64_t last = first + BLOCK < end ? first + BLOCK : end;
        memset(ones, 0, 2 * channels * sizeof(float));
        for (int64_t row = first; row < last; row++) {
            const float *from = widened(x, type, row * channels, channels, buffer);
            for (int64_t i = 0; i < channels; i++) {
                float v = from[i] - shift[i];
                ones[i] += v, squares[i] += v * v;
            }
        }
        for (int64_t i = 0; i < channels; i++) {
            double k = shift[i], count = (double)(last - first);
            to[i].one += ones[i] + count * k;
            to[i].other += squares[i] + 2 * k * ones[i] + count * k * k;
        }
    }
}

/* buffer: columns and 3 * channels. */
static void channel_statistics(
    const void *x, int type, shape s, int64_t begin, int64_t end, float *buffer, pair *to) {
    if (s.length == 1) {
        for (int64_t first = begin, last; first < end; first = last) {
            last = s.groups ? (first / s.places + 1) * s.places : end; /* of one sample */
            last = last < end ? last : end;
            add_columns(
                x, type, first, last, s.channels, buffer + s.columns, buffer, to + first_channel(s, first));
        }
        return;
    }
    for (int64_t row = begin; row < end; row++) {
        const float *from = widened(x, type, row * s.columns, s.columns, buffer);
        pair *places = to + first_channel(s, row);
        for (int64_t k = 0; k < s.columns / s.length; k++) add_run(from + k * s.length, s.length, places + k);
    }
}

/* Sums of all threads are added to those of the first. */
static void join_pairs(pair *of_threads, int64_t count, int threads) {
    for (int thread = 1; thread < threads; thread++)
        for (int64_t i = 0; i < count; i++) {
            of_threads[i].one += of_threads[thread * count + i].one;
            of_threads[i].other += of_threads[thread * count + i].other;
        }
}

/* Channels from one number of statistics to the next. */
INLINE int64_t set_channels(shape s) { return s.groups ? s.channels / s.groups : 1; }

static void pack_channel_rows(
    const void *x, int type, shape s, int64_t begin, int64_t end, const float *means, const float *factors, int bits,
    noise *n, uint8_t *codes, uint8_t *scales, float *buffer) {
    int64_t whole = s.columns / GROUP, groups = (s.columns + GROUP - 1) / GROUP, length = code_bytes(s.columns, bits);
    float *h = buffer + s.columns;
    lanes sign[PARTS];
    load_signs(n->signs, sign);
    for (int64_t row = begin; row < end; row++) {
        const float *from = widened(x, type, row * s.columns, s.columns, buffer);
        const float *mean = means + first_channel(s, row), *factor = factors + first_channel(s, row);
        if (s.length == 1)
            for (int64_t i = 0; i < s.columns; i++) h[i] = (from[i] - mean[i]) * factor[i];
        else
            for (int64_t k = 0; k < s.columns / s.length; k++) {
                float shift = mean[k], scale = factor[k];
                int64_t i = k * s.length, end = i + s.length;
                for (; i + LANES <= end; i += LANES) STORE(h + i, (LOAD(from + i) - shift) * scale);
                if (i < end) store_some(h + i, (int)(end - i), (load_some(from + i, (int)(end - i), 0) - shift) * scale);
            }
        uint8_t *to = codes + row * length, *row_scales = scales + row * groups;
        pack_whole_groups(h, whole, bits, sign, n->rows[row], n->columns, to, row_scales);
        if (whole < groups)
            pack_short_group(
                h + whole * GROUP, (int)(s.columns - whole * GROUP), bits, 0, n->rows[row], n->columns + whole * GROUP,
                to + whole * 8 * bits, row_scales + whole);
    }
}

INLINE void unpack_channel_groups(
    const uint8_t *codes, const uint8_t *scales, int64_t groups, int bits, const lanes signs[PARTS], int32_t a,
    const int32_t *c, float *h) {
    for (int64_t group = 0; group < groups; group++) {
        lanes v[PARTS];
        unpack_group(bits, 0, codes + group * 8 * bits, a, c + group * GROUP, scales + group, v);
        rotate(v);
        for (int k = 0; k < PARTS; k++) STORE(h + group * GROUP + k * LANES, v[k] * signs[k]);
    }
}

/* Writes a row of h. */
static void unpack_channel_row(
    shape s, int64_t row, int bits, const lanes sign[PARTS], const noise *n, const uint8_t *codes, const uint8_t *scales,
    float *h) {
    int64_t whole = s.columns / GROUP, groups = (s.columns + GROUP - 1) / GROUP;
    codes += row * code_bytes(s.columns, bits), scales += row * groups;
#define UNPACK(width) unpack_channel_groups(codes, scales, whole, width, sign, n->rows[row], n->columns, h)
    if (bits == 4) UNPACK(4);
    else if (bits == 3) UNPACK(3);
    else if (bits == 2) UNPACK(2);
    else UNPACK(8);
#undef UNPACK
    if (whole < groups)
        unpack_short_group(
            (int)(s.columns - whole * GROUP), bits, 0, codes + whole * 8 * bits, n->rows[row],
            n->columns + whole * GROUP, scales + whole, h + whole * GROUP);
}

/* Σy and Σyh of every channel. kept: where h goes, or null. buffer: 2 * columns and 2 * channels. */
static void channel_sums(
    const void *y, int type, shape s, int64_t begin, int64_t end, int bits, const noise *n, const uint8_t *codes,
    const uint8_t *scales, float *kept, float *buffer, pair *to) {
    float *h = buffer + s.columns, *ones = buffer + 2 * s.columns, *products = ones + s.channels;
    lanes sign[PARTS];
    load_signs(n->signs, sign);
    if (s.length == 1) memset(ones, 0, 2 * s.channels * sizeof(float));
    for (int64_t row = begin; row < end; row++) {
        const float *from = widened(y, type, row * s.columns, s.columns, buffer);
        pair *places = to + first_channel(s, row);
        h = kept ? kept + row * s.columns : h;
        unpack_channel_row(s, row, bits, sign, n, codes, scales, h);
        if (s.length > 1) {
            for (int64_t k = 0; k < s.columns / s.length; k++) {
                const float *one = from + k * s.length, *other = h + k * s.length;
                lanes sum = {0}, product = {0};
                int64_t i = 0;
                for (; i + LANES <= s.length; i += LANES) {
                    lanes v = LOAD(one + i);
                    sum += v, product += v * LOAD(other + i);
                }
                if (i < s.length) {
                    int left = (int)(s.length - i);
                    lanes v = load_some(one + i, left, 0);
                    sum += v, product += v * load_some(other + i, left, 0);
                }
                places[k].one += lanes_sum(sum), places[k].other += lanes_sum(product);
            }
            continue;
        }
        for (int64_t i = 0; i < s.channels; i++) ones[i] += from[i], products[i] += from[i] * h[i];
        if ((row - begin) % BLOCK < BLOCK - 1 && row + 1 < end && (!s.groups || (row + 1) % s.places)) continue;
        for (int64_t i = 0; i < s.channels; i++) places[i].one += ones[i], places[i].other += products[i];
        memset(ones, 0, 2 * s.channels * sizeof(float));
    }
}

/* dX = y * factor * (1 + v / M) - h * slope - mean. numbers: factors, slopes and means of channels. out: has h, where it
 * is float32. buffer: 3 * columns. */
static void channel_backward_rows(
    const void *y, int type, shape s, int64_t begin, int64_t end, int bits, const noise *n, const uint8_t *codes,
    const uint8_t *scales, const float *numbers, void *out, int out_type, float *buffer) {
    int64_t groups = (s.columns + GROUP - 1) / GROUP, count = apart(s) * s.channels;
    float *h = buffer + s.columns, *to = buffer + 2 * s.columns, part = (float)(1 / (12 * set_size(s)));
    lanes sign[PARTS];
    load_signs(n->signs, sign);
    for (int64_t row = begin; row < end; row++) {
        const float *from = widened(y, type, row * s.columns, s.columns, buffer);
        const float *factors = numbers + first_channel(s, row), *slopes = factors + count, *means = slopes + count;
        const uint8_t *row_scales = scales + row * groups;
        if (out_type == FLOAT32) h = (float *)out + row * s.columns;
        else unpack_channel_row(s, row, bits, sign, n, codes, scales, h);
        if (s.length == 1)
            for (int64_t i = 0; i < s.columns; i++) to[i] = from[i] * factors[i], h[i] = h[i] * slopes[i] + means[i];
        else
            for (int64_t k = 0; k < s.columns / s.length; k++) {
                float factor = factors[k], slope = slopes[k], mean = means[k];
                int64_t i = k * s.length, end = i + s.length;
                for (; i + LANES <= end; i += LANES) {
                    STORE(to + i, LOAD(from + i) * factor);
                    STORE(h + i, LOAD(h + i) * slope + mean);
                }
                if (i < end) {
                    int left = (int)(end - i);
                    store_some(to + i, left, load_some(from + i, left, 0) * factor);
                    store_some(h + i, left, load_some(h + i, left, 0) * slope + mean);
                }
            }
        for (int64_t group = 0; group < groups; group++) {
            float scale = scale_of(row_scales[group]), kept = 1 + scale * scale * part;
            int64_t first = group * GROUP, last = first + GROUP < s.columns ? first + GROUP : s.columns;
            int64_t i = first;
            for (; i + LANES <= last; i += LANES) STORE(h + i, LOAD(to + i) * kept - LOAD(h + i));
            for (; i < last; i++) h[i] = to[i] * kept - h[i];
        }
        if (out_type != FLOAT32) narrow(h, out_type, s.columns, out, row * s.columns);
    }
}

/* x: contiguous, (samples, places, channels, length). groups: of the channels of a sample; 0 where all samples have the
 * same statistics. rows, columns: of the packed matrix. Returns 0, or 2 or more if memory could not be allocated. */
int V(rmm_pack_channels)(
    const void *x, int type, int64_t samples, int64_t places, int64_t channels, int64_t length, int64_t groups,
    int64_t rows, int64_t columns, float eps, int bits, int64_t seed, uint8_t *codes, uint8_t *scales, float *rstds,
    int threads) {
    shape s = {samples, places, channels, length, groups, rows, columns};
    int64_t count = apart(s) * channels, each = 2 * columns + 3 * channels, size = set_channels(s);
    noise n;
    if (!begin_noise(&n, seed, 0, rows, columns)) return 2;
    pair *sums = calloc(threads * count * sizeof(pair) + (threads * each + 2 * count) * sizeof(float) + 1, 1);
    if (!sums) {
        end_noise(&n);
        return 2;
    }
    float *means = (float *)(sums + threads * count), *factors = means + count, *buffers = factors + count;
#pragma omp parallel num_threads(threads)
    {
        int64_t thread = omp_get_thread_num();
        channel_statistics(x, type, s, SHARE(rows), buffers + thread * each, sums + thread * count);
    }
    join_pairs(sums, count, threads);
    for (int64_t set = 0; set < count / size; set++) {
        pair sum = {0, 0};
        for (int64_t i = set * size; i < (set + 1) * size; i++) sum.one += sums[i].one, sum.other += sums[i].other;
        double mean = sum.one / set_size(s), variance = sum.other / set_size(s) - mean * mean;
        rstds[set] = (float)(1 / sqrt((variance > 0 || variance != variance ? variance : 0) + eps));
        for (int64_t i = set * size; i < (set + 1) * size; i++) means[i] = (float)mean, factors[i] = rstds[set];
    }
#pragma omp parallel num_threads(threads)
    {
        int64_t thread = omp_get_thread_num();
        pack_channel_rows(
            x, type, s, SHARE(rows), means, factors, bits, &n, codes, scales, buffers + thread * each);
    }
    free(sums);
    end_noise(&n);
    return 0;
}

/* y, out: contiguous, as x of rmm_pack_channels. gamma: channels, or null for 1. to_gamma, to_beta: channels, or null.
 * Returns 0, or 2 if memory could not be allocated. */
int V(rmm_channel_gradients)(
    const void *y, int type, int64_t samples, int64_t places, int64_t channels, int64_t length, int64_t groups,
    int64_t rows, int64_t columns, int bits, const float *gamma, int64_t seed, const uint8_t *codes,
    const uint8_t *scales, const float *rstds, void *out, int out_type, float *to_gamma, float *to_beta, int threads) {
    shape s = {samples, places, channels, length, groups, rows, columns};
    int64_t count = apart(s) * channels, each = 3 * columns + 2 * channels, size = set_channels(s);
    noise n;
    if (!begin_noise(&n, seed, 0, rows, columns)) return 2;
    pair *sums = calloc(threads * count * sizeof(pair) + (threads * each + 3 * count) * sizeof(float) + 1, 1);
    if (!sums) {
        end_noise(&n);
        return 2;
    }
    float *numbers = (float *)(sums + threads * count), *buffers = numbers + 3 * count;
#pragma omp parallel num_threads(threads)
    {
        int64_t thread = omp_get_thread_num();
        channel_sums(
            y, type, s, SHARE(rows), bits, &n, codes, scales, out_type == FLOAT32 ? out : NULL,
            buffers + thread * each, sums + thread * count);
    }
    join_pairs(sums, count, threads);
    for (int64_t i = 0; to_gamma && i < channels; i++) {
        pair sum = {0, 0};
        for (int64_t k = i; k < count; k += channels) sum.one += sums[k].one, sum.other += sums[k].other;
        to_gamma[i] = (float)sum.other, to_beta[i] = (float)sum.one;
    }
    for (int64_t set = 0; set < count / size; set++) {
        double mean = 0, slope = 0, rstd = rstds[set];
        for (int64_t i = set * size; i < (set + 1) * size; i++) {
            double factor = gamma ? gamma[i % channels] : 1;
            mean += factor * sums[i].one, slope += factor * sums[i].other;
        }
        for (int64_t i = set * size; i < (set + 1) * size; i++) {
            numbers[i] = (float)(rstd * (gamma ? gamma[i % channels] : 1));
            numbers[count + i] = (float)(slope / set_size(s) * rstd);
            numbers[2 * count + i] = (float)(mean / set_size(s) * rstd);
        }
    }
#pragma omp parallel num_threads(threads)
    {
        int64_t thread = omp_get_thread_num();
        channel_backward_rows(
            y, type, s, SHARE(rows), bits, &n, codes, scales, numbers, out, out_type, buffers + thread * each);
    }
    free(sums);
    end_noise(&n);
    return 0;
}
