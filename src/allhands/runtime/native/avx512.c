// Products of float32 matrices with AVX-512.
//
// The thread that multiplies by a block of columns of B packs it, straight from the matrix or from its codes: no dense
// copy is written. Each number of the result is added up in an order that depends on K
// alone, so that it is the same for any number of threads and wherever in the matrix it stands.

#include "pool.h"
#include "side.h"

#ifdef ALLHANDS_WIDE

enum {
    LANES = 16,
    ROWS = 14,                // rows of the result of a kernel: with two vectors of columns they fill the registers
    COLUMNS = 2 * LANES,
    BLOCK_K = 768,            // of K at a time, so that packed B stays in the L2 cache
    BLOCK_M = 64 * ROWS,      // rows of A at a time
    BLOCK_N = 4 * COLUMNS,    // columns of B that a thread takes at a time, at most
    PACKING = 16,             // cost of packing a column, in rows that are multiplied by it
    SLACK = LANES,            // room behind a packed panel, because it is stored sixteen numbers at a time
};

// Prefetch numbers that are read a little later: lines of a matrix are too far apart for the processor to foresee it.
static inline void fetch(const Side *side, ptrdiff_t line, ptrdiff_t place) {
    ptrdiff_t at = line * side->stride + place;
    const char *where = side->codes ? (const char *)(side->codes + at) : (const char *)(side->data + at);
    _mm_prefetch(where, _MM_HINT_T0);
}

// The place of sixteen packed rows: for each place of K, the first sixteen of `width` numbers.
typedef struct {
    float *to;
    ptrdiff_t width;
} Lanes;

// Pack up to sixteen lines from `row` on that go along K: they are transposed, and zeros follow them.
static void pack_turned(const Side *side, int row, Lanes lanes) {
    enum { AHEAD = 4 * LANES };
    int rows = side->rows - row;
    for (int k = 0; k < side->depth; k += LANES) {
        __m512i lines[LANES];
        int some = least(side->depth - k, LANES);
        for (int i = 0; i < LANES; i++) {
            lines[i] = (__m512i)load_values(side, side->row + row + i, side->k + k, i < rows ? first(some) : 0);
            if (i < rows)
                fetch(side, side->row + row + i, side->k + k + AHEAD);
        }
        transpose(lines);
        for (int i = 0; i < some; i++)
            _mm512_storeu_ps(lanes.to + (k + i) * lanes.width, (__m512)lines[i]);
    }
}

// Pack lines that each belong to one place of K: all `lanes` of a line, so that it is read to its end before the next.
static void pack_along(const Side *side, int row, const Lanes *lanes, int count) {
    enum { AHEAD = 16 };
    for (int k = 0; k < side->depth; k++)
        for (int j = 0; j < count; j++) {
            int place = row + j * LANES;
            fetch(side, side->k + k + AHEAD, side->row + place);
            __m512 values = load_values(side, side->k + k, side->row + place, first(side->rows - place));
            _mm512_storeu_ps(lanes[j].to + k * lanes[j].width, values);
        }
}

static void pack(const Side *side, int row, const Lanes *lanes, int count) {
    if (!side->deep)
        pack_along(side, row, lanes, count);
    else
        for (int j = 0; j < count; j++)
            pack_turned(side, row + j * LANES, lanes[j]);
}

// (rows, depth) times (depth, COLUMNS), of which `wide` has both halves, added to `columns` of what is there.
static inline __attribute__((always_inline)) void multiply(const int rows, const int wide, const float *a, const float *b,
                                                           int depth, float *c, ptrdiff_t stride, int columns,
                                                           float alpha, float beta) {
    __m512 sums[ROWS][2];
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) {
        sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        __builtin_prefetch(c + i * stride, 1);
        __builtin_prefetch(c + i * stride + LANES, 1);
    }
    for (int k = 0; k < depth; k++, a += ROWS, b += COLUMNS) {
        __m512 low = _mm512_load_ps(b), high = wide ? _mm512_load_ps(b + LANES) : low;
#pragma GCC unroll 14
        for (int i = 0; i < rows; i++) {
            __m512 value = _mm512_set1_ps(a[i]);
            sums[i][0] = _mm512_fmadd_ps(value, low, sums[i][0]);
            if (wide)
                sums[i][1] = _mm512_fmadd_ps(value, high, sums[i][1]);
        }
    }
    const __mmask16 masks[2] = {first(columns), first(columns - LANES)};
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int j = 0; j < 1 + wide; j++) {
            float *at = c + i * stride + j * LANES;
            __m512 value = _mm512_mul_ps(_mm512_set1_ps(alpha), sums[i][j]);
            if (beta != 0.0f)
                value = _mm512_fmadd_ps(_mm512_set1_ps(beta), _mm512_maskz_loadu_ps(masks[j], at), value);
            _mm512_mask_storeu_ps(at, masks[j], value);
        }
}

// Call the kernel for this number of rows and columns, so that nothing beyond them is computed.
static void multiply_rows(int rows, const float *a, const float *b, int depth, float *c, ptrdiff_t stride, int columns,
                          float alpha, float beta) {
#define KERNEL(n)                                                                                                      \
    case n:                                                                                                            \
        if (columns > LANES)                                                                                           \
            multiply(n, 1, a, b, depth, c, stride, columns, alpha, beta);                                              \
        else                                                                                                           \
            multiply(n, 0, a, b, depth, c, stride, columns, alpha, beta);                                              \
        break
    switch (rows) {
        KERNEL(1);
        KERNEL(2);
        KERNEL(3);
        KERNEL(4);
        KERNEL(5);
        KERNEL(6);
        KERNEL(7);
        KERNEL(8);
        KERNEL(9);
        KERNEL(10);
        KERNEL(11);
        KERNEL(12);
        KERNEL(13);
        KERNEL(ROWS);
    }
#undef KERNEL
}

typedef struct {
    Side a, b;
    float *c;
    ptrdiff_t stride;
    float alpha, beta;
    float *left, *right; // packed A, which is shared, and packed B of each thread
    ptrdiff_t panel;     // numbers of a packed panel of A
    int width, size;     // columns and rows that are one part's
} Product;

static int parts_of(int all, int size) { return (all + size - 1) / size; }

// Cut the result into parts so that all threads are done soonest.
static void cut(Product *p, int threads) {
    double least_cost = -1.0;
    for (int chunks = 1; chunks <= 2 * threads && (chunks == 1 || p->a.rows >= chunks * ROWS * 2); chunks++)
        for (int width = COLUMNS; width <= BLOCK_N; width += COLUMNS) {
            int size = parts_of(parts_of(p->a.rows, chunks), ROWS) * ROWS;
            int parts = parts_of(p->b.rows, width) * parts_of(p->a.rows, size);
            double cost = (double)parts_of(parts, threads) * width * (size + PACKING);
            // Among cuts of the same cost, take the widest: it reads A least often.
            if (least_cost < 0.0 || cost <= least_cost) {
                least_cost = cost;
                p->width = width;
                p->size = size;
            }
        }
}

static void pack_left(void *argument, int panel, int thread) {
    (void)thread;
    const Product *p = argument;
    pack(&p->a, panel * ROWS, &(Lanes){p->left + panel * p->panel, ROWS}, 1);
}

static void multiply_columns(void *argument, int part, int thread) {
    const Product *p = argument;
    int blocks = parts_of(p->b.rows, p->width), column = part % blocks * p->width, from = part / blocks * p->size;
    int until = least(p->a.rows, from + p->size), columns = least(p->b.rows - column, p->width), depth = p->a.depth;
    float *right = p->right + (ptrdiff_t)thread * BLOCK_N * BLOCK_K;
    Lanes lanes[BLOCK_N / LANES];
    for (int j = 0; j < BLOCK_N / LANES; j++)
        lanes[j] = (Lanes){right + j / 2 * COLUMNS * (ptrdiff_t)depth + j % 2 * LANES, COLUMNS};
    pack(&p->b, column, lanes, parts_of(columns, LANES));
    for (int i = from; i < until; i += ROWS)
        for (int j = 0; j < columns; j += COLUMNS)
            multiply_rows(least(until - i, ROWS), p->left + i / ROWS * p->panel, right + j * (ptrdiff_t)depth, depth,
                          p->c + i * p->stride + column + j, p->stride, columns - j, p->alpha, p->beta);
}

int wide_sgemm(Side a, Side b, float alpha, float beta, float *c, ptrdiff_t stride) {
    int threads = pool_threads();
    ptrdiff_t panels = parts_of(least(a.rows, BLOCK_M), ROWS);
    ptrdiff_t panel = parts_of(least(a.depth, BLOCK_K) * ROWS + SLACK, LANES) * LANES;
    float *right = scratch(sizeof(float) * (size_t)((ptrdiff_t)threads * BLOCK_N * BLOCK_K + panels * panel));
    if (right == NULL)
        return 0;
    float *left = right + (ptrdiff_t)threads * BLOCK_N * BLOCK_K;
    for (int i = 0; i < a.rows; i += BLOCK_M)
        for (int k = 0; k < a.depth; k += BLOCK_K) {
            Product p = {part(a, i, BLOCK_M, k, BLOCK_K), part(b, 0, b.rows, k, BLOCK_K), c + i * stride, stride, alpha,
                         k == 0 ? beta : 1.0f, left, right, panel, 0, 0};
            cut(&p, threads);
            pool_run(pack_left, &p, parts_of(p.a.rows, ROWS));
            pool_run(multiply_columns, &p, parts_of(p.b.rows, p.width) * parts_of(p.a.rows, p.size));
        }
    return 1;
}

#endif
