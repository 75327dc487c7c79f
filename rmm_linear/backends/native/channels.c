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
    if (s.length == 1) return s.groups ? row / s.places * s.channels : 0;
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
    int each = whole == groups && whole && whole <= LANES / 2 ? (int)whole : LANES;
    lanes sign[PARTS];
    load_signs(n->signs, sign);
    for (int64_t row = begin, some; row < end; row += some) {
        some = LANES / each < end - row ? LANES / each : end - row; /* short rows, whose scales are found together */
        for (int64_t r = row; r < row + some; r++) {
            const float *from = widened(x, type, r * s.columns, s.columns, buffer);
            const float *mean = means + first_channel(s, r), *factor = factors + first_channel(s, r);
            float *h = buffer + (1 + r - row) * s.columns;
            if (s.length == 1)
                for (int64_t i = 0; i < s.columns; i++) h[i] = (from[i] - mean[i]) * factor[i];
            else
                for (int64_t k = 0; k < s.columns / s.length; k++) {
                    float shift = mean[k], scale = factor[k];
                    int64_t i = k * s.length, stop = i + s.length;
                    for (; i + LANES <= stop; i += LANES) STORE(h + i, (LOAD(from + i) - shift) * scale);
                    int left = (int)(stop - i);
                    if (left) store_some(h + i, left, (load_some(from + i, left, 0) - shift) * scale);
                }
        }
        const float *h = buffer + s.columns;
        uint8_t *to = codes + row * length, *row_scales = scales + row * groups;
        pack_whole_groups(h, some * whole, bits, sign, n->rows + row, each, n->columns, to, row_scales);
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

/* What the gradients need of a channel: sums of y, of y * h, of y * (1 + v / M), and of h. */
typedef struct {
    double y, yh, kept, h;
} four;

/* 1 + v / M of every group of a row, and one number more, which `kept_at` may read. */
INLINE void kept_of(shape s, const uint8_t *scales, float part, float *kept) {
    int64_t groups = (s.columns + GROUP - 1) / GROUP;
    for (int64_t i = 0; i < groups; i++) {
        float scale = scale_of(scales[i]);
        kept[i] = 1 + scale * scale * part;
    }
    if (s.columns > groups) kept[groups] = 0; /* of one column there is room for one number, and no other is read */
}

/* The same of the columns from i on. */
INLINE lanes kept_at(const float *kept, int64_t i) {
    int left = GROUP - (int)(i % GROUP);
    lanes first = all(kept[i / GROUP]);
    if (left >= LANES) return first;
    ints number;
    for (int k = 0; k < LANES; k++) number[k] = k;
    return PICK(number < left, first, all(kept[i / GROUP + 1]));
}

#define SIDE 4 /* rows of channels side by side, whose sums are added at once */

/* Adds the sums over some rows of every column. y, h, kept: of each row. sums: four numbers of every column. */
INLINE void add_side_by_side(
    int rows, const float **y, const float **h, const float **kept, int64_t columns, float *sums) {
    for (int64_t i = 0; i < columns; i += LANES) {
        int left = columns - i < LANES ? (int)(columns - i) : LANES;
        lanes found[4] = {{0}};
        for (int k = 0; k < rows; k++) {
            lanes v = left < LANES ? load_some(y[k] + i, left, 0) : (lanes)LOAD(y[k] + i);
            lanes w = left < LANES ? load_some(h[k] + i, left, 0) : (lanes)LOAD(h[k] + i);
            found[0] += v, found[1] += v * w, found[2] += v * kept_at(kept[k], i), found[3] += w;
        }
        for (int k = 0; k < 4; k++) {
            float *to = sums + k * columns + i;
            if (left < LANES) store_some(to, left, load_some(to, left, 0) + found[k]);
            else STORE(to, LOAD(to) + found[k]);
        }
    }
}

/* The sums of every channel. kept: where h goes, or null. buffer: 3 * SIDE * columns and 4 * channels. */
static void channel_sums(
    const void *y, int type, shape s, int64_t begin, int64_t end, int bits, const noise *n, const uint8_t *codes,
    const uint8_t *scales, float *out, float *buffer, four *to) {
    int64_t groups = (s.columns + GROUP - 1) / GROUP, width = s.columns;
    float *sums = buffer + 3 * SIDE * width, part = (float)(1 / (12 * set_size(s)));
    lanes sign[PARTS];
    load_signs(n->signs, sign);
    memset(sums, 0, 4 * s.channels * sizeof(float));
    for (int64_t row = begin, some; row < end; row += some) {
        const float *from[SIDE], *h[SIDE], *kept[SIDE];
        int64_t last = s.groups && s.length == 1 ? (row / s.places + 1) * s.places : end; /* of one sample */
        last = last < end ? last : end, some = s.length == 1 && row + SIDE <= last ? SIDE : 1;
        for (int k = 0; k < some; k++) {
            float *to_h = out ? out + (row + k) * width : buffer + k * width, *to_kept = buffer + (SIDE + k) * width;
            from[k] = widened(y, type, (row + k) * width, width, buffer + (2 * SIDE + k) * width);
            unpack_channel_row(s, row + k, bits, sign, n, codes, scales, to_h);
            kept_of(s, scales + (row + k) * groups, part, to_kept);
            h[k] = to_h, kept[k] = to_kept;
        }
        four *places = to + first_channel(s, row);
        if (s.length == 1) {
            if (some == SIDE) add_side_by_side(SIDE, from, h, kept, width, sums);
            else add_side_by_side(1, from, h, kept, width, sums);
            if ((row - begin) / BLOCK == (row + some - begin) / BLOCK && row + some < last) continue;
            for (int64_t i = 0; i < s.channels; i++) {
                places[i].y += sums[i], places[i].yh += sums[i + width];
                places[i].kept += sums[i + 2 * width], places[i].h += sums[i + 3 * width];
            }
            memset(sums, 0, 4 * s.channels * sizeof(float));
            continue;
        }
        for (int64_t k = 0; k < width / s.length; k++) {
            lanes sum = {0}, product = {0}, less = {0}, normal = {0};
            for (int64_t i = k * s.length, stop = i + s.length; i < stop; i += LANES) {
                int left = stop - i < LANES ? (int)(stop - i) : LANES;
                lanes v = left < LANES ? load_some(*from + i, left, 0) : (lanes)LOAD(*from + i);
                lanes w = left < LANES ? load_some(*h + i, left, 0) : (lanes)LOAD(*h + i);
                sum += v, product += v * w, normal += w;
                less += v * kept_at(*kept, i);
            }
            places[k].y += lanes_sum(sum), places[k].yh += lanes_sum(product);
            places[k].kept += lanes_sum(less), places[k].h += lanes_sum(normal);
        }
    }
}

/* dX = y * (1 + v / M) * factor - h * slope - mean. numbers: factors, slopes and means of channels. out: has h, where it
 * is float32. buffer: 3 * columns. */
static void channel_backward_rows(
    const void *y, int type, shape s, int64_t begin, int64_t end, int bits, const noise *n, const uint8_t *codes,
    const uint8_t *scales, const float *numbers, void *out, int out_type, float *buffer) {
    int64_t groups = (s.columns + GROUP - 1) / GROUP, count = apart(s) * s.channels;
    float *h = buffer + s.columns, *kept = buffer + 2 * s.columns, part = (float)(1 / (12 * set_size(s)));
    lanes sign[PARTS];
    load_signs(n->signs, sign);
    for (int64_t row = begin; row < end; row++) {
        const float *from = widened(y, type, row * s.columns, s.columns, buffer);
        const float *factors = numbers + first_channel(s, row), *slopes = factors + count, *means = slopes + count;
        if (out_type == FLOAT32) h = (float *)out + row * s.columns;
        else unpack_channel_row(s, row, bits, sign, n, codes, scales, h);
        kept_of(s, scales + row * groups, part, kept);
        if (s.length == 1)
            for (int64_t first = 0; first < s.columns; first += GROUP) {
                int64_t stop = first + GROUP < s.columns ? first + GROUP : s.columns;
                float more = kept[first / GROUP];
                for (int64_t i = first; i < stop; i++)
                    h[i] = from[i] * more * factors[i] - h[i] * slopes[i] - means[i];
            }
        else
            for (int64_t k = 0; k < s.columns / s.length; k++) {
                float factor = factors[k], slope = slopes[k], mean = means[k];
                int64_t i = k * s.length, stop = i + s.length;
                for (; i + LANES <= stop; i += LANES)
                    STORE(h + i, LOAD(from + i) * kept_at(kept, i) * factor - LOAD(h + i) * slope - mean);
                if (i < stop) {
                    int left = (int)(stop - i);
                    lanes v = load_some(from + i, left, 0) * kept_at(kept, i) * factor;
                    store_some(h + i, left, v - load_some(h + i, left, 0) * slope - mean);
                }
            }
        if (out_type != FLOAT32) narrow(h, out_type, s.columns, out, row * s.columns);
    }
}

/* x: contiguous, (samples, places, channels, length). groups: of the channels of a sample; 0 where all samples have the
 * same statistics. rows, columns: of the packed matrix. given, given_rstds: of sets, or null. Returns 0, or 2 or more if memory could not be allocated. */
int V(rmm_pack_channels)(
    const void *x, int type, int64_t samples, int64_t places, int64_t channels, int64_t length, int64_t groups,
    int64_t rows, int64_t columns, float eps, const float *given, const float *given_rstds, int bits, int64_t seed,
    uint8_t *codes, uint8_t *scales, float *rstds, int threads) {
    shape s = {samples, places, channels, length, groups, rows, columns};
    int64_t count = apart(s) * channels, each = 2 * columns + LANES * GROUP + 3 * channels, size = set_channels(s);
    noise n;
    if (!begin_noise(&n, seed, 0, rows, columns)) return 2;
    pair *sums = calloc(threads * count * sizeof(pair) + (threads * each + 2 * count) * sizeof(float) + 1, 1);
    if (!sums) {
        end_noise(&n);
        return 2;
    }
    float *means = (float *)(sums + threads * count), *factors = means + count, *buffers = factors + count;
    if (!given) {
#pragma omp parallel num_threads(threads)
        {
            int64_t thread = omp_get_thread_num();
            channel_statistics(x, type, s, SHARE(rows), buffers + thread * each, sums + thread * count);
        }
        join_pairs(sums, count, threads);
    }
    for (int64_t set = 0; set < count / size; set++) {
        pair sum = {0, 0};
        for (int64_t i = set * size; i < (set + 1) * size; i++) sum.one += sums[i].one, sum.other += sums[i].other;
        double mean = sum.one / set_size(s), variance = sum.other / set_size(s) - mean * mean;
        rstds[set] = (float)(1 / sqrt((variance > 0 || variance != variance ? variance : 0) + eps));
        if (given) mean = given[set], rstds[set] = given_rstds[set];
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
    int64_t count = apart(s) * channels, each = 3 * SIDE * columns + 4 * channels, size = set_channels(s);
    noise n;
    if (!begin_noise(&n, seed, 0, rows, columns)) return 2;
    four *sums = calloc(threads * count * sizeof(four) + (threads * each + 3 * count) * sizeof(float) + 1, 1);
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
    for (int64_t i = count; i < threads * count; i++) {
        four *all = sums + i % count;
        all->y += sums[i].y, all->yh += sums[i].yh, all->kept += sums[i].kept, all->h += sums[i].h;
    }
    for (int64_t i = 0; to_gamma && i < channels; i++) {
        double of_gamma = 0, of_beta = 0;
        for (int64_t k = i; k < count; k += channels) of_gamma += sums[k].yh, of_beta += sums[k].y;
        to_gamma[i] = (float)of_gamma, to_beta[i] = (float)of_beta;
    }
    for (int64_t set = 0; set < count / size; set++) {
        double mean = 0, slope = 0, normal = 0, rstd = rstds[set];
        for (int64_t i = set * size; i < (set + 1) * size; i++) {
            double factor = gamma ? gamma[i % channels] : 1;
            mean += factor * sums[i].kept, slope += factor * sums[i].yh, normal += sums[i].h;
        }
        slope /= set_size(s), mean = (mean - slope * normal) / set_size(s);
        for (int64_t i = set * size; i < (set + 1) * size; i++) {
            numbers[i] = (float)(rstd * (gamma ? gamma[i % channels] : 1));
            numbers[count + i] = (float)(slope * rstd);
            numbers[2 * count + i] = (float)(mean * rstd);
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
