// For kernels in which a warp takes 32 columns through ROWS rows, 16 at a time, in four products of eight columns each.
// So that a thread's eight columns stand side by side, the products' columns are shared out by turns:
// column 8 (i / 2) + 2 j + i % 2 is column i of product j.

constexpr int ROWS = 64;

// Factors (K, 32) of which from[k * down + column * right] is one, two of a column in a word.
template <int K>
__device__ __forceinline__ void columns_of(uint32 (&to)[(K + 7) / 8][4], const T* from, size_t down, size_t right) {
  const int i = threadIdx.x % 32 / 4;
  #pragma unroll
  for (int part = 0; part < (K + 7) / 8; part++) {
    const int k = part * 8 + threadIdx.x % 4 * 2;
    #pragma unroll
    for (int j = 0; j < 4; j++) {
      const T* at = from + k * down + (i / 2 * 8 + 2 * j + i % 2) * right;
      to[part][j] = k < K ? at[0].bits | (uint32)at[down].bits << 16 : 0;
    }
  }
}

// Factors (2, K) of two rows.
template <int K>
__device__ __forceinline__ void rows_of(uint32 (&to)[(K + 7) / 8][2], const T* first, const T* second) {
  #pragma unroll
  for (int part = 0; part < (K + 7) / 8; part++) {
    const int k = part * 8 + threadIdx.x % 4 * 2;
    to[part][0] = k < K ? *reinterpret_cast<const uint32*>(first + k) : 0;
    to[part][1] = k < K ? *reinterpret_cast<const uint32*>(second + k) : 0;
  }
}

// Values 2 j and 2 j + 1 of both rows, with the products added.
template <int PARTS>
__device__ __forceinline__ void adapted(
    float (&to)[4], const Vec<T> (&x)[2], int j, const uint32 (&left)[PARTS][2], const uint32 (&right)[PARTS][4]) {
  #pragma unroll
  for (int k = 0; k < 4; k++) to[k] = static_cast<float>(x[k / 2].v[2 * j + k % 2]);
  #pragma unroll
  for (int part = 0; part < PARTS; part++) add_product(to, left[part], right[part][j], T());
}

// Eight values that a thread has made of a row.
struct alignas(16) Words {
  uint32 v[4];
};
