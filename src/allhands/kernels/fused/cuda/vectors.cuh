// Arrays read and written 16 bytes at a time, and functions that several kernels use.

#define INFINITY __int_as_float(0x7f800000)

typedef float float32;

template <typename U>
struct alignas(16) Vec {
  static constexpr int W = 16 / sizeof(U);
  U v[W];
};

// An array may be a view of another one, which begins anywhere; then values are read and written one by one.
template <typename Block, typename U>
__device__ __forceinline__ Block read(const U* p) {
  if (reinterpret_cast<size_t>(p) % sizeof(Block) == 0) return *reinterpret_cast<const Block*>(p);
  Block x;
  #pragma unroll
  for (int k = 0; k < sizeof(Block) / sizeof(U); k++) x.v[k] = p[k];
  return x;
}

template <typename U>
__device__ __forceinline__ Vec<U> load(const U* p, size_t i) {
  return read<Vec<U>>(p + i * Vec<U>::W);
}

template <typename U>
__device__ __forceinline__ void store(U* p, size_t i, const Vec<U>& x) {
  p += i * Vec<U>::W;
  if (reinterpret_cast<size_t>(p) % sizeof(Vec<U>) == 0) {
    *reinterpret_cast<Vec<U>*>(p) = x;
    return;
  }
  #pragma unroll
  for (int k = 0; k < Vec<U>::W; k++) p[k] = x.v[k];
}

template <typename U>
struct alignas(4 * sizeof(U)) Quad {
  U v[4];
};

template <typename U>
__device__ __forceinline__ Quad<U> quad(const U* p, size_t i) {
  return read<Quad<U>>(p + i * 4);
}

__device__ __forceinline__ float logistic(float x) {
  return __fdividef(1.f, 1.f + __expf(-x));
}

__device__ __forceinline__ float warp_sum(float x) {
  for (int o = 16; o > 0; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}

// The sum over LANES neighbours, a power of two; the whole warp takes part.
template <int LANES>
__device__ __forceinline__ float lanes_sum(float x) {
  #pragma unroll
  for (int o = LANES / 2; o > 0; o >>= 1) x += __shfl_xor_sync(~0u, x, o);
  return x;
}
