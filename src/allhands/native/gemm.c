// Products of float32 matrices on Intel's matrix unit (AMX), at float32 accuracy.
//
// The unit multiplies bfloat16 (8 significant bits) and adds in float32. A float32 (24 bits) is exactly the sum of
// three bfloat16, x = h + m + l with |m| <= |x| / 2^9 and |l| <= |x| / 2^18, and products of bfloat16 are exact in
// float32. Of the nine products of two such sums the three smallest, together below |x y| / 2^25, are left out: less
// than the rounding of one float32 multiplication. The other six at the unit's rate are more than twice as fast as the
// processor's own float32 multiplications.
//
// Each number of the result is added up in an order that depends on K alone, so that it is the same for any number of
// threads and wherever in the matrix it stands. Numbers below 1e-38 count as zero.

#include "pool.h"

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef void (*sgemm_t)(int, int, int, int, int, int, float, const float *, int, const float *, int, float, float *,
                        int);
enum { ROW_MAJOR = 101, NO_TRANS = 111, TRANS = 112 };

static sgemm_t other; // OpenBLAS, for what is small and for processors without the unit
static int has_unit;

#ifdef __AMX_BF16__

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum {
    PANEL = 16,              // rows of a tile
    STEP = 32,               // of K in a tile
    PIECES = 3,              // h, m, l
    TILE = PANEL * STEP,     // bfloat16 values
    BLOCK_K = 24 * STEP,     // of K at a time, so that what is split stays in the L2 cache
    BLOCK_M = 32 * PANEL * 2, // rows of A at a time
    BLOCK_N = 4 * PANEL,     // columns of B that a thread takes at a time
    ARCH_REQ_XCOMP_PERM = 0x1023,
    XTILEDATA = 18,
};

// A factor as it lies in memory: lines of values, either float32 or codes of one byte in groups.
typedef struct {
    const float *data;
    const uint8_t *codes;
    const float *scales, *biases; // of each group of a line: value = code * scale + bias
    ptrdiff_t stride;             // of a line
    int shift, groups;            // a group has 1 << shift values; groups of a line
    int row, k;      // where the part at hand begins
    int rows, depth; // and how large it is
    int deep;        // whether a line goes along K
} Side;

static int ask_for_unit(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0; }

static void configure_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } __attribute__((aligned(64))) config = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = PANEL;
    }
    _tile_loadconfig(&config);
}

static inline __m512 widened(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

// Three bfloat16 for each of 32 numbers, those of `low` first.
static inline void split(__m512 low, __m512 high, __m512i *pieces) {
    for (int p = 0; p < PIECES; p++) {
        __m512i piece = (__m512i)_mm512_cvtne2ps_pbh(high, low);
        pieces[p] = piece;
        low = _mm512_sub_ps(low, widened(_mm512_castsi512_si256(piece)));
        high = _mm512_sub_ps(high, widened(_mm512_extracti64x4_epi64(piece, 1)));
    }
}

static inline void transpose(__m512i *r) {
    __m512i t[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; j++) {
            t[i + j] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0x88);
            t[i + j + 4] = _mm512_shuffle_i32x4(r[i + j], r[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; j++) {
        r[j] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0x88);
        r[j + 8] = _mm512_shuffle_i32x4(t[j], t[j + 8], 0xdd);
    }
}

// Sixteen values of a line, those beyond the mask zero.
static inline __m512 load_values(const Side *side, ptrdiff_t line, ptrdiff_t place, __mmask16 mask) {
    ptrdiff_t at = line * side->stride + place;
    if (side->codes == NULL)
        return _mm512_maskz_loadu_ps(mask, side->data + at);
    if (mask == 0)
        return _mm512_setzero_ps();
    ptrdiff_t group = line * side->groups + (place >> side->shift);
    __m512 code = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, side->codes + at)));
    __m512 value = _mm512_mul_ps(code, _mm512_set1_ps(side->scales[group]));
    return _mm512_maskz_add_ps(mask, value, _mm512_set1_ps(side->biases[group]));
}

static inline __mmask16 first(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

// One tile of each piece from up to 16 rows and 32 of K at `from`. `pairs_down`: pairs of K go down and rows across,
// as the unit wants its right factor; else rows go down.
static inline void pack_tile(const Side *side, int row, int k, int pairs_down, uint16_t *to) {
    __m512i lines[PIECES][16];
    int rows = side->rows - row, depth = side->depth - k;
    for (int i = 0; i < 16; i++) {
        __m512 low, high;
        if (side->deep) {
            ptrdiff_t line = side->row + row + i, place = side->k + k;
            low = load_values(side, line, place, i < rows ? first(depth) : 0);
            high = load_values(side, line, place + 16, i < rows ? first(depth - 16) : 0);
        } else {
            ptrdiff_t line = side->k + k + 2 * i, place = side->row + row;
            __m512 even = load_values(side, line, place, 2 * i < depth ? first(rows) : 0);
            __m512 odd = load_values(side, line + 1, place, 2 * i + 1 < depth ? first(rows) : 0);
            const __m512i front = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            const __m512i back = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            low = _mm512_permutex2var_ps(even, front, odd);
            high = _mm512_permutex2var_ps(even, back, odd);
        }
        __m512i pieces[PIECES];
        split(low, high, pieces);
        for (int p = 0; p < PIECES; p++)
            lines[p][i] = pieces[p];
    }
    for (int p = 0; p < PIECES; p++) {
        if (side->deep == pairs_down)
            transpose(lines[p]);
        for (int i = 0; i < 16; i++)
            _mm512_store_si512(to + p * TILE + i * STEP, lines[p][i]);
    }
}

// 16 rows with all of the part's K.
static void pack_panel(const Side *side, int row, int pairs_down, uint16_t *to) {
    for (int k = 0; k < side->depth; k += STEP, to += PIECES * TILE)
        pack_tile(side, row, k, pairs_down, to);
}

#define MULTIPLY_FOUR                                                                                                  \
    _tile_dpbf16ps(0, 4, 6);                                                                                           \
    _tile_dpbf16ps(1, 4, 7);                                                                                           \
    _tile_dpbf16ps(2, 5, 6);                                                                                           \
    _tile_dpbf16ps(3, 5, 7)

#define LOAD_LEFT(p)                                                                                                   \
    _tile_loadd(4, a + (p) * TILE, 64);                                                                                \
    _tile_loadd(5, a + panel + (p) * TILE, 64)

#define LOAD_RIGHT(p)                                                                                                  \
    _tile_loadd(6, b + (p) * TILE, 64);                                                                                \
    _tile_loadd(7, b + panel + (p) * TILE, 64)

// (32, K) times (K, 32) into `sums`, (32, 32).
static void multiply_block(const uint16_t *a, const uint16_t *b, int steps, float *sums) {
    const ptrdiff_t panel = (ptrdiff_t)steps * PIECES * TILE;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int s = 0; s < steps; s++, a += PIECES * TILE, b += PIECES * TILE) {
        LOAD_LEFT(2);
        LOAD_RIGHT(0);
        MULTIPLY_FOUR; // l h
        LOAD_LEFT(1);
        MULTIPLY_FOUR; // m h
        LOAD_LEFT(0);
        MULTIPLY_FOUR; // h h
        LOAD_RIGHT(2);
        MULTIPLY_FOUR; // h l
        LOAD_RIGHT(1);
        MULTIPLY_FOUR; // h m
        LOAD_LEFT(1);
        MULTIPLY_FOUR; // m m
    }
    _tile_stored(0, sums, 128);
    _tile_stored(1, sums + 16, 128);
    _tile_stored(2, sums + 16 * 32, 128);
    _tile_stored(3, sums + 16 * 32 + 16, 128);
}

static void add_block(const float *sums, float *c, ptrdiff_t stride, int rows, int columns, float alpha, float beta) {
    for (int i = 0; i < rows && i < 32; i++)
        for (int j = 0; j < columns && j < 32; j += 16) {
            __mmask16 mask = first(columns - j);
            float *at = c + i * stride + j;
            __m512 value = _mm512_mul_ps(_mm512_set1_ps(alpha), _mm512_load_ps(sums + i * 32 + j));
            if (beta != 0.0f)
                value = _mm512_fmadd_ps(_mm512_set1_ps(beta), _mm512_maskz_loadu_ps(mask, at), value);
            _mm512_mask_storeu_ps(at, mask, value);
        }
}

typedef struct {
    Side a, b;
    float *c;
    ptrdiff_t stride;
    float alpha, beta;
    uint16_t *left, *right; // what is split of A, shared; and of B, for each thread
    int steps;
    int blocks, size; // of columns; rows that are one part's
} Product;

static void pack_left(void *argument, int panel, int thread) {
    (void)thread;
    const Product *p = argument;
    pack_panel(&p->a, panel * PANEL, 0, p->left + (ptrdiff_t)panel * p->steps * PIECES * TILE);
}

static void multiply_columns(void *argument, int part, int thread) {
    const Product *p = argument;
    int block = part % p->blocks, from = part / p->blocks * p->size;
    int until = from + p->size < p->a.rows ? from + p->size : p->a.rows;
    const ptrdiff_t panel = (ptrdiff_t)p->steps * PIECES * TILE;
    uint16_t *right = p->right + thread * (BLOCK_N / PANEL) * (ptrdiff_t)(BLOCK_K / STEP) * PIECES * TILE;
    int column = block * BLOCK_N, columns = p->b.rows - column < BLOCK_N ? p->b.rows - column : BLOCK_N;
    for (int j = 0; j < columns; j += PANEL * 2) {
        pack_panel(&p->b, column + j, 1, right + j / PANEL * panel);
        pack_panel(&p->b, column + j + PANEL, 1, right + (j / PANEL + 1) * panel);
    }
    float sums[32 * 32] __attribute__((aligned(64)));
    configure_tiles();
    for (int i = from; i < until; i += PANEL * 2)
        for (int j = 0; j < columns; j += PANEL * 2) {
            multiply_block(p->left + i / PANEL * panel, right + j / PANEL * panel, p->steps, sums);
            add_block(sums, p->c + i * p->stride + column + j, p->stride, p->a.rows - i, columns - j, p->alpha,
                      p->beta);
        }
    _tile_release();
}

static int least(int a, int b) { return a < b ? a : b; }

static Side part(Side side, int row, int rows, int k, int depth) {
    side.row = row;
    side.k = k;
    side.rows = least(side.rows - row, rows);
    side.depth = least(side.depth - k, depth);
    return side;
}

// Where what is split stands; kept by each calling thread.
static uint16_t *scratch(size_t bytes) {
    static __thread void *kept;
    static __thread size_t size;
    if (bytes > size) {
        free(kept);
        kept = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        size = kept ? bytes : 0;
    }
    return kept;
}

// Into how many parts the rows are cut, so that all threads have as much to do: as few as will do, because the block of
// B is split again for each.
static int row_chunks(int blocks, int rows, int threads) {
    for (int chunks = 1; chunks <= 2 * threads && rows >= chunks * PANEL * 4; chunks++) {
        int parts = blocks * chunks, rounds = (parts + threads - 1) / threads;
        if (parts * 10 >= rounds * threads * 9)
            return chunks;
    }
    return 1;
}

static int unit_sgemm(Side a, Side b, float alpha, float beta, float *c, ptrdiff_t stride) {
    int threads = pool_threads();
    size_t tile_bytes = sizeof(uint16_t) * TILE * PIECES * (BLOCK_K / STEP);
    size_t panels = (least(a.rows, BLOCK_M) + PANEL * 2 - 1) / (PANEL * 2) * 2;
    uint16_t *left = scratch(tile_bytes * (panels + (size_t)threads * BLOCK_N / PANEL));
    if (left == NULL)
        return 0;
    uint16_t *right = left + tile_bytes / sizeof(uint16_t) * panels;
    for (int i = 0; i < a.rows; i += BLOCK_M)
        for (int k = 0; k < a.depth; k += BLOCK_K) {
            Product p = {part(a, i, BLOCK_M, k, BLOCK_K), part(b, 0, b.rows, k, BLOCK_K), c + i * stride, stride, alpha,
                         k == 0 ? beta : 1.0f, left, right, 0, 0, 0};
            p.steps = (p.a.depth + STEP - 1) / STEP;
            p.blocks = (p.b.rows + BLOCK_N - 1) / BLOCK_N;
            int chunks = row_chunks(p.blocks, p.a.rows, threads);
            p.size = ((p.a.rows + chunks - 1) / chunks + PANEL * 2 - 1) / (PANEL * 2) * (PANEL * 2);
            pool_run(pack_left, &p, (p.a.rows + PANEL * 2 - 1) / (PANEL * 2) * 2);
            pool_run(multiply_columns, &p, p.blocks * ((p.a.rows + p.size - 1) / p.size));
        }
    return 1;
}

// Whether the unit is faster than OpenBLAS: measured on Sapphire Rapids in more than 500 sizes, by 1.2 to 1.7 times on one
// thread, and by 0.8 to 1.5 on two, which share what it needs. The number of threads does not decide: that would change
// the last bits of a run with it.
static int worth_it(int m, int n, int k) {
    return m >= 24 && n >= 24 && k >= 24 && (double)m * n * k >= 1 << 20;
}

#endif

// 1 if the matrix unit is used.
int allhands_prepare(sgemm_t fallback, int threads) {
    other = fallback;
#ifdef __AMX_BF16__
    has_unit = ask_for_unit();
#endif
    pool_set_threads(threads);
    return has_unit;
}

// 1 if the matrix unit is used.
int allhands_set_threads(int threads) {
    pool_set_threads(threads);
    return has_unit;
}

// Which way products go: 0 whichever is worth it, 1 OpenBLAS, 2 the unit if there is one. For measurements and tests.
static int forced;
void allhands_force_way(int way) { forced = way; }

#ifdef __AMX_BF16__
static int by_unit(int m, int n, int k) { return has_unit && forced != 1 && (forced == 2 || worth_it(m, n, k)); }
#endif

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

// OpenBLAS on this pool's threads: its own would wait, spinning, on the cores that these need.
static void other_sgemm(Slices *s) {
    int threads = pool_threads(), longest = s->m > s->n ? s->m : s->n;
    // OpenBLAS adds up otherwise where little is to be multiplied: parts must not be small where the whole is not.
    while (threads > 1 && ((double)s->m * s->n * s->k < threads * (double)(1 << 21) || longest < threads * 32))
        threads--;
    s->down = s->m >= s->n;
    s->size = ((longest + threads - 1) / threads + 31) / 32 * 32;
    pool_run(multiply_slice, s, (longest + s->size - 1) / s->size);
}

// A left factor whose products are not computed: MLX has no other way to give memory that nobody has written.
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
#ifdef __AMX_BF16__
    if (by_unit(m, n, k)) {
        Side left = {.data = a, .stride = lda, .rows = m, .depth = k, .deep = trans_a == NO_TRANS};
        Side right = {.data = b, .stride = ldb, .rows = n, .depth = k, .deep = trans_b != NO_TRANS};
        if (unit_sgemm(left, right, alpha, beta, c, ldc))
            return;
    }
#endif
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

// (rows, columns) of codes, a scale and a bias for each group along the columns, as the values that they stand for.
void allhands_decode(const uint8_t *codes, const float *scales, const float *biases, const int sizes[3], float *to) {
    Codes all = {codes, scales, biases, to, sizes[1], sizes[2]};
    pool_run(decode_line, &all, sizes[0]);
}

// For (rows, columns) of codes in groups of a power of two, 16 or more, along the columns: x of (m, columns) times their
// transpose, or, with `back`, x of (m, rows) times them. 0 if there is no memory for it.
int allhands_coded_product(const float *x, int m, const uint8_t *codes, const float *scales, const float *biases,
                           const int sizes[3], int back, float *y) {
    int rows = sizes[0], columns = sizes[1], group = sizes[2];
    int n = back ? columns : rows, k = back ? rows : columns;
#ifdef __AMX_BF16__
    if (by_unit(m, n, k)) {
        Side left = {.data = x, .stride = k, .rows = m, .depth = k, .deep = 1};
        Side right = {.codes = codes, .scales = scales, .biases = biases, .stride = columns, .rows = n, .depth = k,
                      .shift = __builtin_ctz((unsigned)group), .groups = columns / group, .deep = !back};
        return unit_sgemm(left, right, 1.0f, 0.0f, y, n);
    }
#endif
    Codes all = {codes, scales, biases, aligned_alloc(64, ((size_t)rows * (size_t)columns * sizeof(float) + 63) / 64 * 64),
                 columns, group};
    if (all.to == NULL)
        return 0;
    pool_run(decode_line, &all, rows);
    cblas_sgemm(ROW_MAJOR, NO_TRANS, back ? NO_TRANS : TRANS, m, n, k, 1.0f, x, k, all.to, columns, 0.0f, y, n);
    free(all.to);
    return 1;
}
