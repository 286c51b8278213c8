// table: (V, D); ids: (N,), negative ones counting from the end; out: (N, D).

extern "C" __global__ void NAME(const T* table, const int* ids, T* out, int count, int size) {
  constexpr int PARTS = D / Vec<T>::W;
  size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= (size_t)count * PARTS) return;
  int id = ids[i / PARTS];
  store<T>(out, i, load<T>(table, (size_t)(id < 0 ? id + size : id) * PARTS + i % PARTS));
}
