// x, out: (B, T, H + 2 KV, D), heads of queries, keys and values; turns: (T or more, D / 2, 2) cosines and sines.
// Queries and keys are turned, values copied.

extern "C" __global__ void NAME(const T* x, const float* turns, T* out, int rows, int length) {
  constexpr int W = Vec<T>::W, PART = D / 2 / W, HEADS = H + 2 * KV;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)rows * HEADS * PART) return;
  int part = i % PART;
  size_t head = i / PART;
  size_t at = head * (2 * PART) + part;
  Vec<T> a = load<T>(x, at), b = load<T>(x, at + PART);
  if (head % HEADS < H + KV) {
    const float2* turn = reinterpret_cast<const float2*>(turns) + (head / HEADS % length) * (D / 2) + part * W;
    #pragma unroll
    for (int j = 0; j < W; j++) {
      float2 t = turn[j];
      float u = static_cast<float>(a.v[j]), v = static_cast<float>(b.v[j]);
      a.v[j] = static_cast<T>(u * t.x - v * t.y);
      b.v[j] = static_cast<T>(v * t.x + u * t.y);
    }
  }
  store<T>(out, at, a);
  store<T>(out, at + PART, b);
}
