/* Rows of Walsh-Hadamard, Hartley and cosine transforms along the tokens: rmm_linear/sketches/transforms.py in compiled
 * form, for powers of two. Some columns are transformed at a time, which stay in a cache. */

#define SLAB 32 /* columns */
#define VECTORS (SLAB / LANES)
#define LEAF 64 /* rows from which on halves are transformed by themselves, for the caches' sake */

/* m: rows of `type`, `stride` apart. order: the token of each of the n rows, -1 for a row of zeros. */
typedef struct {
    const void *m;
    int type;
    int64_t columns, stride, n;
    const int64_t *order;
    const float *signs;
} signed_rows;

/* cosine, sine: of 2 pi k / n for k < n / 2; null for Hadamard. */
typedef struct {
    const float *cosine, *sine;
    int64_t n;
} transform;

/* Row k of the result is u[k] times row first[k] of the transform, plus v[k] times row second[k] unless that is null. */
typedef struct {
    const int64_t *first, *second;
    const float *u, *v;
    int64_t rows;
} combination;

INLINE void load_slab(const signed_rows *from, int type, int64_t column, int count, lanes *work) {
    for (int64_t row = 0; row < from->n; row++) {
        int64_t at = from->order[row] * from->stride + column;
        lanes *to = work + row * VECTORS;
        if (from->order[row] < 0)
            for (int j = 0; j < VECTORS; j++) to[j] = all(0);
        else if (count == SLAB)
            for (int j = 0; j < VECTORS; j++) to[j] = load_elements(from->m, type, at + j * LANES) * all(from->signs[row]);
        else {
            float buffer[SLAB] = {0};
            for (int i = 0; i < count; i++) buffer[i] = element(from->m, type, at + i) * from->signs[row];
            for (int j = 0; j < VECTORS; j++) to[j] = LOAD(buffer + j * LANES);
        }
    }
}

/* a + t and a - t in place of a row and the row to which the second goes. */
INLINE void add_subtract(lanes *a, lanes *b, const lanes *t) {
    for (int j = 0; j < VECTORS; j++) {
        lanes sum = a[j] + t[j], difference = a[j] - t[j];
        a[j] = sum, b[j] = difference;
    }
}

/* From the transforms of the even and of the odd rows, h each, that of all; for Hadamard, of the first and last rows. */
INLINE void combine(lanes *w, int64_t h, const transform *f) {
    lanes *other = w + h * VECTORS;
    if (!f->cosine) {
        for (int64_t k = 0; k < h * VECTORS; k += VECTORS) add_subtract(w + k, other + k, other + k);
        return;
    }
    add_subtract(w, other, other);
    if (h > 1) add_subtract(w + h / 2 * VECTORS, other + h / 2 * VECTORS, other + h / 2 * VECTORS);
    for (int64_t k = 1; 2 * k < h; k++) {
        lanes cosine = all(f->cosine[f->n / (2 * h) * k]), sine = all(f->sine[f->n / (2 * h) * k]);
        lanes *one = other + k * VECTORS, *last = other + (h - k) * VECTORS, t[VECTORS], s[VECTORS];
        for (int j = 0; j < VECTORS; j++) {
            t[j] = cosine * one[j] + sine * last[j];
            s[j] = sine * one[j] - cosine * last[j];
        }
        add_subtract(w + k * VECTORS, one, t);
        add_subtract(w + (h - k) * VECTORS, last, s);
    }
}

static void run_transform(lanes *w, int64_t n, const transform *f) {
    if (n > LEAF) {
        run_transform(w, n / 2, f), run_transform(w + n / 2 * VECTORS, n / 2, f);
        combine(w, n / 2, f);
        return;
    }
    for (int64_t h = 1; h < n; h *= 2)
        for (int64_t begin = 0; begin < n; begin += 2 * h) combine(w + begin * VECTORS, h, f);
}

static void store_slab(
    const lanes *work, const combination *c, int64_t column, int count, int64_t columns, int type, void *z) {
    for (int64_t row = 0; row < c->rows; row++) {
        const lanes *first = work + c->first[row] * VECTORS;
        const lanes *second = c->second ? work + c->second[row] * VECTORS : first;
        float made[SLAB], v = c->second ? c->v[row] : 0;
        for (int j = 0; j < VECTORS; j++) {
            lanes sum = first[j] * all(c->u[row]);
            if (c->second) sum += second[j] * all(v);
            STORE(made + j * LANES, sum);
        }
        narrow(made, type, count, z, row * columns + column);
    }
}

/* m: of `type`. z: (rows, columns), of `type`, contiguous. Returns 0, or 2 if memory could not be allocated. */
int V(rmm_transform)(
    const void *m, int type, int64_t columns, int64_t stride, int64_t n, const int64_t *order, const float *signs,
    const float *cosine, const float *sine, const int64_t *first, const int64_t *second, const float *u, const float *v,
    int64_t rows, void *z, int threads) {
    signed_rows from = {m, type, columns, stride, n, order, signs};
    transform f = {cosine, sine, n};
    combination c = {first, second, u, v, rows};
    int result = 0;
#pragma omp parallel num_threads(threads) reduction(| : result)
    {
        lanes *work = aligned_alloc(64, n * SLAB * sizeof(float));
        if (!work) result = 2;
#pragma omp for schedule(dynamic)
        for (int64_t column = 0; column < columns; column += SLAB) {
            if (!work) continue;
            int count = columns - column < SLAB ? (int)(columns - column) : SLAB;
            /* The type is a constant in each call, so that the compiler specializes it. */
            if (type == FLOAT32) load_slab(&from, FLOAT32, column, count, work);
            else if (type == BFLOAT16) load_slab(&from, BFLOAT16, column, count, work);
            else load_slab(&from, FLOAT16, column, count, work);
            run_transform(work, n, &f);
            store_slab(work, &c, column, count, columns, type, z);
        }
        free(work);
    }
    return result;
}
