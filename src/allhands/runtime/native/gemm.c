// Products of float32 matrices by the fastest of three ways: the processor's matrix unit, our own AVX-512, or OpenBLAS.

#include "pool.h"
#include "side.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

typedef void (*sgemm_t)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *,
                        int);
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

static sgemm_t other; // OpenBLAS, for small products and for other processors

#ifdef ALLHANDS_WIDE
// Returns whether a way is faster than OpenBLAS for these sizes. The number of threads is not considered: otherwise a
// run with more or fewer threads would get other last bits. Speed relative to OpenBLAS, measured in more than 500
// sizes: the matrix unit on Sapphire Rapids is 1.2 to 1.7 times as fast on one thread, and 0.8 to 1.5 times on two,
// which share what the unit needs; AVX-512 on Zen 5 is 0.9 to 1.6 times as fast on one, and 0.8 to 2 times on two.
static int worth_it(int way, int m, int n, int k) {
    if ((double)m * n * k < 1 << 20)
        return 0;
    return way == 2 ? m >= 24 && n >= 24 && k >= 24 : m >= 8 && n >= 96 && k >= 32;
}
#endif

// How large products are multiplied: 0 by OpenBLAS, 1 by our own AVX-512, 2 by the matrix unit.
static int best;

// Prepare for `threads` threads, with OpenBLAS's sgemm as `fallback`. Returns the way of large products, as in `best`.
int allhands_prepare(sgemm_t fallback, int threads) {
    other = fallback;
#ifdef ALLHANDS_WIDE
    best = 1;
#endif
#ifdef __AMX_BF16__
    best = ask_for_unit() ? 2 : best;
#endif
    pool_set_threads(threads);
    return best;
}

void allhands_set_threads(int threads) { pool_set_threads(threads); }

// The way of all products, whatever their size, if the processor has it; -1: whichever is worth it. For measurements
// and tests.
static int forced = -1;
void allhands_force_way(int way) { forced = way; }

static int way_of(int m, int n, int k) {
    if (forced >= 0)
        return forced < best ? forced : best;
#ifdef ALLHANDS_WIDE
    return worth_it(best, m, n, k) ? best : 0;
#else
    (void)m, (void)n, (void)k;
    return 0;
#endif
}

// Returns 0 if OpenBLAS has to compute the product.
static int own_sgemm(int way, Side a, Side b, float alpha, float beta, float *c, ptrdiff_t stride) {
    (void)way, (void)a, (void)b, (void)alpha, (void)beta, (void)c, (void)stride;
#ifdef __AMX_BF16__
    if (way == 2)
        return unit_sgemm(a, b, alpha, beta, c, stride);
#endif
#ifdef ALLHANDS_WIDE
    if (way == 1)
        return wide_sgemm(a, b, alpha, beta, c, stride);
#endif
    return 0;
}

typedef struct {
    int trans_a, trans_b, m, n, k, lda, ldb, ldc, down, size;
    float alpha, beta;
    const float *a, *b;
    float *c;
} Slices;

// Some of the rows (`down`) or of the columns of a product.
static void multiply_slice(void *argument, int part, int thread) {
    (void)thread;
    const Slices *s = argument;
    ptrdiff_t from = (ptrdiff_t)part * s->size;
    int length = (int)((s->down ? s->m : s->n) - from);
    length = length < s->size ? length : s->size;
    const float *a = s->a, *b = s->b;
    if (s->down)
        a += s->trans_a == NO_TRANS ? from * s->lda : from;
    else
        b += s->trans_b == NO_TRANS ? from : from * s->ldb;
    other(ROW_MAJOR, s->trans_a, s->trans_b, s->down ? length : s->m, s->down ? s->n : length, s->k, s->alpha, a, s->lda,
          b, s->ldb, s->beta, s->c + (s->down ? from * s->ldc : from), s->ldc);
}

// Compute a product by OpenBLAS on this pool's threads. OpenBLAS's own threads would spin while they wait, on cores
// that this pool needs. Its AVX2 kernels add up an element in an order that depends on the element's place in the
// product. So the sizes alone decide how a product is cut: with another number of threads, the bits are the same. Parts
// are so large that OpenBLAS is as fast on them as on the whole product.
static void other_sgemm(Slices *s) {
    int longest = s->m > s->n ? s->m : s->n, parts = 1;
    while (parts < 16 && longest >= 2 * parts * 64 && (double)s->m * s->n * s->k >= 2 * parts * (double)(1 << 21))
        parts *= 2;
    s->down = s->m >= s->n;
    s->size = ((longest + parts - 1) / parts + 31) / 32 * 32;
    pool_run(multiply_slice, s, (longest + s->size - 1) / s->size);
}

// A left factor whose products are not computed. With it a product is a new array of MLX's whose memory is not written:
// MLX has no other way to make one.
static const float *_Atomic left_out;
void allhands_leave_out(const float *factor) { atomic_store(&left_out, factor); }

void cblas_sgemm(int order, int trans_a, int trans_b, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc) {
    if (a != NULL && a == atomic_load(&left_out))
        return;
    if (order != ROW_MAJOR || m < 1 || n < 1 || (trans_a != NO_TRANS && trans_a != TRANS) ||
        (trans_b != NO_TRANS && trans_b != TRANS)) {
        other(order, trans_a, trans_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
        return;
    }
    int way = way_of(m, n, k);
    Side left = {.data = a, .stride = lda, .rows = m, .depth = k, .deep = trans_a == NO_TRANS};
    Side right = {.data = b, .stride = ldb, .rows = n, .depth = k, .deep = trans_b != NO_TRANS};
    if (way && own_sgemm(way, left, right, alpha, beta, c, ldc))
        return;
    Slices s = {.trans_a = trans_a, .trans_b = trans_b, .m = m, .n = n, .k = k, .lda = lda, .ldb = ldb, .ldc = ldc,
                .alpha = alpha, .beta = beta, .a = a, .b = b, .c = c};
    other_sgemm(&s);
}

typedef struct {
    const uint8_t *codes;
    const float *scales, *biases;
    float *to;
    int columns, group;
} Codes;

static void decode_line(void *argument, int line, int thread) {
    (void)thread;
    const Codes *c = argument;
    ptrdiff_t groups = c->columns / c->group, at = (ptrdiff_t)line * c->columns;
    for (ptrdiff_t g = 0; g < groups; g++, at += c->group) {
        float scale = c->scales[line * groups + g], bias = c->biases[line * groups + g];
        for (int i = 0; i < c->group; i++)
            c->to[at + i] = c->codes[at + i] * scale + bias;
    }
}

// Decode (rows, columns) of codes, with a scale and a bias for each group along the columns, into `to`; `sizes`: rows,
// columns, values of a group.
void allhands_decode(const uint8_t *codes, const float *scales, const float *biases, const int sizes[3], float *to) {
    Codes all = {codes, scales, biases, to, sizes[1], sizes[2]};
    pool_run(decode_line, &all, sizes[0]);
}

// Multiply x by a weight that is kept as (rows, columns) of codes. Groups go along the columns; their size is a power
// of two, 16 or more. Without `back`: x (m, columns) times the transposed weight, y (m, rows). With `back`: x (m, rows)
// times the weight, y (m, columns). The codes may be some rows of a larger weight: then a line with a value for each
// row (of y, or of x with `back`) has a stride of sizes[3]. `sizes`: rows, columns, values of a group, this stride.
// With `add` the product is added to y. Returns 0 if there is too little memory.
int allhands_coded_product(const float *x, int m, const uint8_t *codes, const float *scales, const float *biases,
                           const int sizes[4], int back, int add, float *y) {
    int rows = sizes[0], columns = sizes[1], group = sizes[2];
    int n = back ? columns : rows, k = back ? rows : columns;
    int from = back ? sizes[3] : columns, to = back ? columns : sizes[3];
    float beta = add ? 1.0f : 0.0f;
    int way = way_of(m, n, k);
    if (way) {
        Side left = {.data = x, .stride = from, .rows = m, .depth = k, .deep = 1};
        Side right = {.codes = codes, .scales = scales, .biases = biases, .stride = columns, .rows = n, .depth = k,
                      .shift = __builtin_ctz((unsigned)group), .groups = columns / group, .deep = !back};
        return own_sgemm(way, left, right, 1.0f, beta, y, to);
    }
    Codes all = {codes, scales, biases, aligned_alloc(64, ((size_t)rows * (size_t)columns * sizeof(float) + 63) / 64 * 64),
                 columns, group};
    if (all.to == NULL)
        return 0;
    pool_run(decode_line, &all, rows);
    cblas_sgemm(ROW_MAJOR, NO_TRANS, back ? NO_TRANS : TRANS, m, n, k, 1.0f, x, from, all.to, columns, beta, y, to);
    free(all.to);
    return 1;
}
