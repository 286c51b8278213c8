// w: (N, K / 8) uint32 of 4 bits each; s, b: (N, K / GROUP); out: (N, K). A thread makes four words, one of each quarter
// of what its block makes, so that neighbours read and write neighbouring words.

extern "C" __global__ void NAME(const uint32* w, const T* s, const T* b, T* out, int count) {
  constexpr int WORDS = GROUP / 8;
  size_t first = (size_t)blockIdx.x * 1024 + threadIdx.x;
  uint32 word[4];
  float scale[4], bias[4];
  #pragma unroll
  for (int k = 0; k < 4; k++) {
    size_t i = first + k * 256;
    if (i < count) {
      word[k] = w[i];
      scale[k] = static_cast<float>(s[i / WORDS]);
      bias[k] = static_cast<float>(b[i / WORDS]);
    }
  }
  #pragma unroll
  for (int k = 0; k < 4; k++) {
    size_t i = first + k * 256;
    if (i < count) {
      float values[8];
      // 2^23 with the four bits as its last ones, less 2^23: conversions of integers are slower than the memory.
      #pragma unroll
      for (int j = 0; j < 8; j++)
        values[j] = fmaf(__uint_as_float(0x4B000000u | ((word[k] >> (4 * j)) & 15u)) - 8388608.f, scale[k], bias[k]);
      // Written past the cache, which the matrix product that reads it needs for its input.
      uint4 packed = make_uint4(
          pair(values[0], values[1], T()), pair(values[2], values[3], T()), pair(values[4], values[5], T()),
          pair(values[6], values[7], T()));
      __stcs(reinterpret_cast<uint4*>(out) + i, packed);
    }
  }
}
