// g: (N, D); places, targets: (N,), of which a negative target has no row; out: (M, D). No place twice.

extern "C" __global__ void NAME(const T* g, const int* places, const int* targets, T* out, int count) {
  constexpr int PARTS = D / Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)count * PARTS || targets[i / PARTS] < 0) return;
  store<T>(out, (size_t)places[i / PARTS] * PARTS + i % PARTS, load<T>(g, i));
}
