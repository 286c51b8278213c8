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
#include "side.h"

#ifdef __AMX_BF16__

#include <sys/syscall.h>
#include <unistd.h>

enum {
    PANEL = 16,              // rows of a tile
    STEP = 32,               // of K in a tile
    PIECES = 3,              // h, m, l
    TILE = PANEL * STEP,     // bfloat16 values
    BLOCK_K = 24 * STEP,     // of K at a time, so that the pieces stay in the L2 cache
    BLOCK_M = 32 * PANEL * 2, // rows of A at a time
    BLOCK_N = 4 * PANEL,     // columns of B that a thread takes at a time
    ARCH_REQ_XCOMP_PERM = 0x1023,
    XTILEDATA = 18,
};

int ask_for_unit(void) { return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0; }

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

// Pack one tile of each piece, from up to 16 rows and 32 places of K, beginning at `row` and `k`. With `pairs_down`,
// pairs of K go down and rows across, as the unit wants its right factor; else rows go down.
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

// Pack 16 rows with all of the part's K.
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
    uint16_t *left, *right; // split A, which is shared, and split B of each thread
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

// The number of parts into which the rows are cut: the fewest with which all threads have about equal work, because the
// block of B is split again for each part.
static int row_chunks(int blocks, int rows, int threads) {
    for (int chunks = 1; chunks <= 2 * threads && rows >= chunks * PANEL * 4; chunks++) {
        int parts = blocks * chunks, rounds = (parts + threads - 1) / threads;
        if (parts * 10 >= rounds * threads * 9)
            return chunks;
    }
    return 1;
}

int unit_sgemm(Side a, Side b, float alpha, float beta, float *c, ptrdiff_t stride) {
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

#endif
