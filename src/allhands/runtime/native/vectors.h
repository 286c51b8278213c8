// Vectors of sixteen float32, in the compiler's own notation. Each processor can compute with them, in one register or
// in several.

#ifndef ALLHANDS_VECTORS_H
#define ALLHANDS_VECTORS_H

#include <stdint.h>
#include <string.h>

enum { WIDTH = 16 };
typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));

static inline vec load(const float *from) {
    vec x;
    memcpy(&x, from, sizeof x);
    return x;
}

static inline void store(float *to, vec x) { memcpy(to, &x, sizeof x); }

static inline vec all(float x) { return (vec){} + x; }

static inline vec choose(ivec condition, vec yes, vec no) {
    return (vec)(((ivec)yes & condition) | ((ivec)no & ~condition));
}

static inline float sum(vec x) {
    float total = 0.0f;
    for (int i = 0; i < WIDTH; i++)
        total += x[i];
    return total;
}

static inline float largest(vec x) {
    float most = x[0];
    for (int i = 1; i < WIDTH; i++)
        most = x[i] > most ? x[i] : most;
    return most;
}

// Compute e^x with a relative error of at most 2e-7 for x from -87 to 88. A lower x gives e^-87, a higher one e^88. nan
// stays nan.
static inline vec exponential(vec x) {
    x = choose(x < -87.0f, all(-87.0f), x);
    x = choose(x > 88.0f, all(88.0f), x);
    // x = n ln 2 + r. Adding 1.5 * 2^23 and subtracting it again rounds to whole numbers.
    vec n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    vec r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
    vec p = all(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec exponent = __builtin_convertvector(choose(n == n, n, all(0.0f)), ivec);
    return p * (vec)((exponent + 127) << 23);
}

#endif
