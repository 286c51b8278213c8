// Operations of a transformer's block other than matrix products: norm, gated unit and attention. Each takes one pass
// over its data, on all threads.

#include "pool.h"
#include "vectors.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

enum { ROWS = 16, COLUMNS = 64, BLOCK = 64, CHUNK = 4096 };

static inline int least(int a, int b) { return a < b ? a : b; }
static inline int padded(int count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }

// --- root mean square norm -------------------------------------------------------------------------------------------

typedef struct {
    const float *x, *weight, *cotangent;
    float *out, *in_weight, *factors, eps;
    int rows, width;
} Norm;

static float dot(const float *a, const float *b, int count) {
    vec total = all(0.0f);
    int i = 0;
    for (; i + WIDTH <= count; i += WIDTH)
        total += load(a + i) * load(b + i);
    float result = sum(total);
    for (; i < count; i++)
        result += a[i] * b[i];
    return result;
}

static void norm_rows(void *argument, int part, int thread) {
    (void)thread;
    const Norm *n = argument;
    for (int row = part * ROWS; row < least(n->rows, (part + 1) * ROWS); row++) {
        const float *x = n->x + (ptrdiff_t)row * n->width;
        float *out = n->out + (ptrdiff_t)row * n->width;
        float factor = 1.0f / sqrtf(dot(x, x, n->width) / n->width + n->eps);
        for (int i = 0; i < n->width; i++)
            out[i] = n->weight[i] * (x[i] * factor);
    }
}

static void norm_rows_back(void *argument, int part, int thread) {
    (void)thread;
    const Norm *n = argument;
    for (int row = part * ROWS; row < least(n->rows, (part + 1) * ROWS); row++) {
        const float *x = n->x + (ptrdiff_t)row * n->width, *c = n->cotangent + (ptrdiff_t)row * n->width;
        float *out = n->out + (ptrdiff_t)row * n->width;
        float factor = 1.0f / sqrtf(dot(x, x, n->width) / n->width + n->eps);
        for (int i = 0; i < n->width; i++)
            out[i] = n->weight[i] * c[i];
        float share = dot(out, x, n->width) / n->width * factor * factor * factor;
        for (int i = 0; i < n->width; i++)
            out[i] = out[i] * factor - x[i] * share;
        if (n->factors)
            n->factors[row] = factor;
    }
}

// Compute the gradient of COLUMNS weights. Rows are added up always in the same order, and in blocks of BLOCK, so that
// the rounding error stays small.
static void norm_columns_back(void *argument, int part, int thread) {
    (void)thread;
    const Norm *n = argument;
    int first = part * COLUMNS, count = least(COLUMNS, n->width - first);
    float total[COLUMNS] = {0};
    for (int start = 0; start < n->rows; start += BLOCK) {
        float block[COLUMNS] = {0};
        for (int row = start; row < least(n->rows, start + BLOCK); row++) {
            const float *x = n->x + (ptrdiff_t)row * n->width + first;
            const float *c = n->cotangent + (ptrdiff_t)row * n->width + first;
            float factor = n->factors[row];
            for (int i = 0; i < count; i++)
                block[i] += c[i] * (x[i] * factor);
        }
        for (int i = 0; i < count; i++)
            total[i] += block[i];
    }
    for (int i = 0; i < count; i++)
        n->in_weight[first + i] = total[i];
}

// Compute x / sqrt(mean(x^2) + eps) * weight for each row of x (rows, width).
void allhands_norm(const float *x, const float *weight, float eps, float *out, int rows, int width) {
    Norm n = {x, weight, NULL, out, NULL, NULL, eps, rows, width};
    pool_run(norm_rows, &n, (rows + ROWS - 1) / ROWS);
}

// Compute the norm's gradient of x into `out`, and of the weight into `in_weight` unless that is NULL. Returns 1, or 0
// if there is too little memory.
int allhands_norm_back(const float *x, const float *weight, const float *cotangent, float eps, float *out,
                       float *in_weight, int rows, int width) {
    float *factors = in_weight ? malloc((size_t)rows * sizeof(float)) : NULL;
    if (in_weight && rows && !factors)
        return 0;
    Norm n = {x, weight, cotangent, out, in_weight, factors, eps, rows, width};
    pool_run(norm_rows_back, &n, (rows + ROWS - 1) / ROWS);
    if (in_weight)
        pool_run(norm_columns_back, &n, (width + COLUMNS - 1) / COLUMNS);
    free(factors);
    return 1;
}

// --- silu(gate) * up -------------------------------------------------------------------------------------------------

typedef struct {
    const float *gate, *up, *cotangent;
    float *first, *second;
    ptrdiff_t count;
} Gated;

static inline void gated(const Gated *g, ptrdiff_t i) {
    vec gate = load(g->gate + i), up = load(g->up + i);
    vec s = 1.0f / (1.0f + exponential(-gate)), silu = gate * s;
    if (g->cotangent == NULL) {
        store(g->first + i, silu * up);
        return;
    }
    vec c = load(g->cotangent + i);
    store(g->first + i, c * up * (s + silu * (1.0f - s)));
    store(g->second + i, c * silu);
}

static void gated_chunk(void *argument, int part, int thread) {
    (void)thread;
    const Gated *g = argument;
    ptrdiff_t start = (ptrdiff_t)part * CHUNK, end = start + CHUNK < g->count ? start + CHUNK : g->count;
    ptrdiff_t i = start;
    for (; i + WIDTH <= end; i += WIDTH)
        gated(g, i);
    if (i == end)
        return;
    float buffer[5][WIDTH] = {{0}};
    size_t bytes = (size_t)(end - i) * sizeof(float);
    memcpy(buffer[0], g->gate + i, bytes);
    memcpy(buffer[1], g->up + i, bytes);
    if (g->cotangent)
        memcpy(buffer[2], g->cotangent + i, bytes);
    Gated rest = {buffer[0], buffer[1], g->cotangent ? buffer[2] : NULL, buffer[3], buffer[4], WIDTH};
    gated(&rest, 0);
    memcpy(g->first + i, buffer[3], bytes);
    if (g->cotangent)
        memcpy(g->second + i, buffer[4], bytes);
}

// Compute silu(gate) * up for `count` values.
void allhands_gated(const float *gate, const float *up, float *out, ptrdiff_t count) {
    Gated g = {gate, up, NULL, out, NULL, count};
    pool_run(gated_chunk, &g, (int)((count + CHUNK - 1) / CHUNK));
}

// Compute the gradients of gate and up into `in_gate` and `in_up`.
void allhands_gated_back(const float *gate, const float *up, const float *cotangent, float *in_gate, float *in_up,
                         ptrdiff_t count) {
    Gated g = {gate, up, cotangent, in_gate, in_up, count};
    pool_run(gated_chunk, &g, (int)((count + CHUNK - 1) / CHUNK));
}

// --- causal attention with rotary embedding --------------------------------------------------------------------------

typedef struct {
    const float *q, *k, *v, *cosines, *sines, *cotangent; // k, v: (B, T, heads * D); cosines, sines: (T, D / 2)
    float *out, *in_q, *in_k, *in_v;
    float *scratch;
    size_t per_thread; // floats of scratch for each thread
    float scale;
    int length, heads, kv_heads, width; // length: T; width: D
    int before;                         // the number of first places that have keys, but no queries: q has T - before
    const int *starts; // (B, T - before): the first place that each query sees; NULL if each sees from place 0 on
} Attention;

// Compute one tile of c = a b, or of c += a b with `add`: `rows` rows and `vectors` vectors of WIDTH columns. `row` and
// `column` are the strides of a, in floats.
static inline __attribute__((always_inline)) void product_tile(int rows, int vectors, int k, const float *a,
                                                               ptrdiff_t row, ptrdiff_t column, const float *b,
                                                               ptrdiff_t b_row, float *c, ptrdiff_t c_row, int add) {
    vec sums[4][4];
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++)
            sums[i][j] = add ? load(c + i * c_row + j * WIDTH) : all(0.0f);
    for (int p = 0; p < k; p++) {
        vec right[4];
        for (int j = 0; j < vectors; j++)
            right[j] = load(b + p * b_row + j * WIDTH);
        for (int i = 0; i < rows; i++) {
            vec left = all(a[i * row + p * column]);
            for (int j = 0; j < vectors; j++)
                sums[i][j] += left * right[j];
        }
    }
    for (int i = 0; i < rows; i++)
        for (int j = 0; j < vectors; j++)
            store(c + i * c_row + j * WIDTH, sums[i][j]);
}

// Compute c (m, n) = a b, or c += a b with `add`, for a (m, k) with any strides and b (k, n). n is a multiple of WIDTH.
static void product(int m, int n, int k, const float *a, ptrdiff_t row, ptrdiff_t column, const float *b,
                    ptrdiff_t b_row, float *c, ptrdiff_t c_row, int add) {
    for (int j = 0; j < n;) {
        int vectors = n - j >= 4 * WIDTH ? 4 : 1;
        for (int i = 0; i < m;) {
            int rows = m - i >= 4 ? 4 : 1;
            const float *left = a + i * row;
            float *to = c + i * c_row + j;
            if (rows == 4 && vectors == 4)
                product_tile(4, 4, k, left, row, column, b + j, b_row, to, c_row, add);
            else if (rows == 4)
                product_tile(4, 1, k, left, row, column, b + j, b_row, to, c_row, add);
            else if (vectors == 4)
                product_tile(1, 4, k, left, row, column, b + j, b_row, to, c_row, add);
            else
                product_tile(1, 1, k, left, row, column, b + j, b_row, to, c_row, add);
            i += rows;
        }
        j += vectors * WIDTH;
    }
}

// Multiply `from` by `factor` and turn its pairs (i, i + D / 2) by the place's angle, or back if `sign` is -1.
static void turn(const Attention *a, int place, float sign, float factor, const float *from, float *to) {
    int half = a->width / 2;
    const float *c = a->cosines + (ptrdiff_t)place * half, *s = a->sines + (ptrdiff_t)place * half;
    for (int i = 0; i < half; i++) {
        float x = from[i] * factor, y = from[i + half] * factor, turned = s[i] * sign;
        to[i] = x * c[i] - y * turned;
        to[i + half] = y * c[i] + x * turned;
    }
}

// Turn the scores of the query at `place` into probabilities of the places from `start` to `place`, and into zeros for
// the other ones of `count` places.
static void softmax_row(float *scores, int start, int place, int count) {
    for (int i = 0; i < start; i++)
        scores[i] = -INFINITY;
    for (int i = place + 1; i < count; i++)
        scores[i] = -INFINITY;
    vec most = load(scores);
    for (int i = WIDTH; i < count; i += WIDTH) {
        vec x = load(scores + i);
        most = choose(x > most, x, most);
    }
    float top = largest(most);
    vec total = all(0.0f);
    for (int i = 0; i < count; i += WIDTH) {
        vec x = load(scores + i);
        // A masked place gets exactly 0: exponential() itself returns no less than about e^-87.
        vec e = choose(x == -INFINITY, all(0.0f), exponential(x - top));
        total += e;
        store(scores + i, e);
    }
    vec factor = all(1.0f / sum(total));
    for (int i = 0; i < count; i += WIDTH)
        store(scores + i, load(scores + i) * factor);
}

typedef struct {
    float *keys, *keys_across, *values_across, *queries, *scores, *grads, *in_keys, *in_values;
    int across; // floats of a row that goes across places: the length, padded to a multiple of WIDTH
} Room;

static size_t room_floats(const Attention *a) {
    size_t length = (size_t)padded(a->length), width = (size_t)a->width;
    return 5 * length * width + 2 * ROWS * width + 2 * ROWS * length;
}

static Room room_of(const Attention *a, int thread) {
    float *at = a->scratch + thread * a->per_thread;
    size_t length = (size_t)padded(a->length), width = (size_t)a->width;
    Room r = {.across = (int)length};
    float **places[] = {&r.keys, &r.keys_across, &r.values_across, &r.in_keys, &r.in_values};
    for (int i = 0; i < 5; i++, at += length * width)
        *places[i] = at;
    r.queries = at;
    r.scores = at + 2 * ROWS * width;
    r.grads = r.scores + ROWS * length;
    return r;
}

// Transpose (length, width) into rows of `to_row` floats, filled up with zeros.
static void across(const float *from, ptrdiff_t row, int length, int width, float *to, int to_row) {
    for (int i = 0; i < width; i++) {
        for (int t = 0; t < length; t++)
            to[(ptrdiff_t)i * to_row + t] = from[t * row + i];
        for (int t = length; t < to_row; t++)
            to[(ptrdiff_t)i * to_row + t] = 0.0f;
    }
}

// Compute the probabilities of `rows` queries from place `first` on into the room's scores. The turned and scaled
// queries stay in the room, for the gradients.
static void probabilities(const Attention *a, const Room *r, const float *q, int batch, int first, int rows, int count) {
    const int *starts = a->starts ? a->starts + (ptrdiff_t)batch * (a->length - a->before) - a->before : NULL;
    ptrdiff_t row = (ptrdiff_t)a->heads * a->width;
    for (int i = 0; i < rows; i++)
        turn(a, first + i, 1.0f, a->scale, q + (first + i) * row, r->queries + i * a->width);
    product(rows, count, a->width, r->queries, a->width, 1, r->keys_across, r->across, r->scores, r->across, 0);
    for (int i = 0; i < rows; i++)
        softmax_row(r->scores + (ptrdiff_t)i * r->across, starts ? starts[first + i] : 0, first + i, count);
}

static void turn_keys(const Attention *a, const Room *r, const float *k) {
    ptrdiff_t row = (ptrdiff_t)a->kv_heads * a->width;
    for (int t = 0; t < a->length; t++)
        turn(a, t, 1.0f, 1.0f, k + t * row, r->keys + (ptrdiff_t)t * a->width);
    across(r->keys, a->width, a->length, a->width, r->keys_across, r->across);
}

// Returns the offset of place 0 in the queries of a head. q begins at place `before`, so the places before it may lie
// outside of q: they are not read.
static ptrdiff_t start_of(const Attention *a, int batch, int head) {
    ptrdiff_t row = (ptrdiff_t)a->heads * a->width;
    return ((ptrdiff_t)batch * (a->length - a->before) - a->before) * row + head * a->width;
}

static void attend(void *argument, int part, int thread) {
    const Attention *a = argument;
    const Room r = room_of(a, thread);
    int batch = part / a->kv_heads, kv = part % a->kv_heads, group = a->heads / a->kv_heads;
    ptrdiff_t kv_row = (ptrdiff_t)a->kv_heads * a->width, row = (ptrdiff_t)a->heads * a->width;
    ptrdiff_t kv_start = batch * a->length * kv_row + kv * a->width;
    turn_keys(a, &r, a->k + kv_start);
    for (int h = kv * group; h < (kv + 1) * group; h++) {
        ptrdiff_t start = start_of(a, batch, h);
        for (int first = a->before; first < a->length; first += ROWS) {
            int rows = least(ROWS, a->length - first), seen = first + rows;
            probabilities(a, &r, a->q + start, batch, first, rows, padded(seen));
            product(rows, a->width, seen, r.scores, r.across, 1, a->v + kv_start, kv_row, a->out + start + first * row,
                    row, 0);
        }
    }
}

static void block_back(const Attention *a, const Room *r, ptrdiff_t start, int batch, int first) {
    ptrdiff_t row = (ptrdiff_t)a->heads * a->width;
    int rows = least(ROWS, a->length - first), seen = first + rows, count = padded(seen), width = a->width;
    const float *c = a->cotangent + start + first * row;
    float *turned = r->queries + ROWS * width;
    probabilities(a, r, a->q + start, batch, first, rows, count);
    product(rows, count, width, c, row, 1, r->values_across, r->across, r->grads, r->across, 0);
    product(seen, width, rows, r->scores, 1, r->across, c, row, r->in_values, width, 1);
    for (int i = 0; i < rows; i++) {
        float *p = r->scores + (ptrdiff_t)i * r->across, *g = r->grads + (ptrdiff_t)i * r->across;
        vec mean = all(dot(p, g, count));
        for (int j = 0; j < count; j += WIDTH)
            store(g + j, load(p + j) * (load(g + j) - mean));
    }
    product(rows, width, seen, r->grads, r->across, 1, r->keys, width, turned, width, 0);
    for (int i = 0; i < rows; i++)
        turn(a, first + i, -1.0f, a->scale, turned + i * width, a->in_q + start + (first + i) * row);
    product(seen, width, rows, r->grads, 1, r->across, r->queries, width, r->in_keys, width, 1);
}

static void attend_back(void *argument, int part, int thread) {
    const Attention *a = argument;
    const Room r = room_of(a, thread);
    int batch = part / a->kv_heads, kv = part % a->kv_heads, group = a->heads / a->kv_heads;
    ptrdiff_t kv_row = (ptrdiff_t)a->kv_heads * a->width;
    ptrdiff_t kv_start = batch * a->length * kv_row + kv * a->width;
    size_t bytes = (size_t)a->length * (size_t)a->width * sizeof(float);
    turn_keys(a, &r, a->k + kv_start);
    across(a->v + kv_start, kv_row, a->length, a->width, r.values_across, r.across);
    memset(r.in_keys, 0, bytes);
    memset(r.in_values, 0, bytes);
    for (int h = kv * group; h < (kv + 1) * group; h++)
        for (int first = a->before; first < a->length; first += ROWS)
            block_back(a, &r, start_of(a, batch, h), batch, first);
    for (int t = 0; t < a->length; t++) {
        turn(a, t, -1.0f, 1.0f, r.in_keys + (ptrdiff_t)t * a->width, a->in_k + kv_start + t * kv_row);
        memcpy(a->in_v + kv_start + t * kv_row, r.in_values + (ptrdiff_t)t * a->width, (size_t)a->width * sizeof(float));
    }
}

// Compute the attention, or its gradients. `inputs`: q, k, v, cosines, sines, cotangent. `outputs`: out, and the
// gradients of q, k and v. If the cotangent is NULL, `out` is written, else the gradients are. `sizes`: batch, length,
// heads, heads of keys and values, width of a head (a multiple of WIDTH), `before`. `before` and `starts`: as in
// Attention. Returns 1, or 0 if there is too little memory.
int allhands_attention(const float *const inputs[6], float *const outputs[4], float scale, const int sizes[6],
                       const int *starts) {
    Attention a = {.q = inputs[0], .k = inputs[1], .v = inputs[2], .cosines = inputs[3], .sines = inputs[4],
                   .cotangent = inputs[5], .out = outputs[0], .in_q = outputs[1], .in_k = outputs[2],
                   .in_v = outputs[3], .scale = scale, .length = sizes[1], .heads = sizes[2], .kv_heads = sizes[3],
                   .width = sizes[4], .before = sizes[5], .starts = starts};
    a.per_thread = room_floats(&a);
    a.scratch = aligned_alloc(64, a.per_thread * sizeof(float) * (size_t)pool_threads());
    if (a.scratch == NULL)
        return 0;
    pool_run(a.cotangent ? attend_back : attend, &a, sizes[0] * sizes[3]);
    free(a.scratch);
    return 1;
}
