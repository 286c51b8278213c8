// Types of half precision, and what needs instructions of the GPU's own: conversions and small matrix products.

typedef unsigned int uint32;

struct float16 {
  unsigned short bits;
  float16() = default;
  __device__ __forceinline__ explicit float16(float x) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
  }
};

struct bfloat16 {
  unsigned short bits;
  bfloat16() = default;
  __device__ __forceinline__ explicit bfloat16(float x) { asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(x)); }
  __device__ __forceinline__ operator float() const { return __uint_as_float((uint32)bits << 16); }
};

// Two values in one word, the first in its lower half; half the conversions.
__device__ __forceinline__ uint32 pair(float first, float second, bfloat16) {
  uint32 both;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}

__device__ __forceinline__ uint32 pair(float first, float second, float16) {
  uint32 both;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(second), "f"(first));
  return both;
}

// to (16, 8) += left (16, 8) @ right (8, 8) by a warp. Thread i holds columns 2 (i % 4) and the next of rows i / 4 and
// i / 4 + 8 of the first two, and rows 2 (i % 4) and the next of column i / 4 of the third.
__device__ __forceinline__ void add_product(float (&to)[4], const uint32 (&left)[2], uint32 right, bfloat16) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
      : "r"(left[0]), "r"(left[1]), "r"(right));
}

__device__ __forceinline__ void add_product(float (&to)[4], const uint32 (&left)[2], uint32 right, float16) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+f"(to[0]), "+f"(to[1]), "+f"(to[2]), "+f"(to[3])
      : "r"(left[0]), "r"(left[1]), "r"(right));
}
