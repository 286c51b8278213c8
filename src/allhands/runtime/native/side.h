// The factors of a product, for code that packs them itself: see amx.c and avx512.c.

#ifndef ALLHANDS_SIDE_H
#define ALLHANDS_SIDE_H

#include <stddef.h>
#include <stdint.h>

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

// c = alpha * a b^T + beta * c, for a of (rows, depth) and b of (rows, depth). They return 0 if there is too little
// memory. unit_sgemm needs the processor's matrix unit; ask_for_unit asks the system for it, and returns 0 without one.
#define HIDDEN __attribute__((visibility("hidden")))
HIDDEN int unit_sgemm(Side a, Side b, float alpha, float beta, float *c, ptrdiff_t stride);
HIDDEN int ask_for_unit(void);
HIDDEN int wide_sgemm(Side a, Side b, float alpha, float beta, float *c, ptrdiff_t stride);

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define ALLHANDS_WIDE

#include <immintrin.h>
#include <stdlib.h>

// Transpose sixteen rows of sixteen numbers of 32 bits, in place.
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

// The mask of the first `count` lanes, at most sixteen.
static inline __mmask16 first(int count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

static inline int least(int a, int b) { return a < b ? a : b; }

static inline Side part(Side side, int row, int rows, int k, int depth) {
    side.row = row;
    side.k = k;
    side.rows = least(side.rows - row, rows);
    side.depth = least(side.depth - k, depth);
    return side;
}

// Memory for packed factors. Each calling thread keeps its own. NULL if there is too little memory.
static inline void *scratch(size_t bytes) {
    static __thread void *kept;
    static __thread size_t size;
    if (bytes > size) {
        free(kept);
        kept = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
        size = kept ? bytes : 0;
    }
    return kept;
}

#endif
#endif
