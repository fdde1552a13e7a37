// What kernels/cpu/noise.h makes of keys and words, for tests/kernels/test_noise_of_all.py.

#include "noise.h"

using namespace eagle;

// Philox of one counter, by numbers and by vectors: words uint32 [4] and [4, 16].
extern "C" void rounds(const uint32_t* counter, uint64_t key, uint32_t* one, uint32_t* many) {
  u32x16 x[4];
  for (int i = 0; i < 4; ++i) {
    one[i] = counter[i];
    x[i] = u32x16{} + counter[i];
  }
  philox(one, key);
  philox(x, key);
  std::memcpy(many, x, sizeof x);
}

// Words of 64 tokens from 4 * first on, in their order, and the same one by one: uint32 [64] each.
extern "C" void words(int64_t seed, int64_t sample, int64_t position, uint32_t first, uint32_t* together, uint32_t* apart) {
  u32x16 x[4];
  words_from({seed, sample, position}, first, x);
  interleave(x);
  std::memcpy(together, x, sizeof x);
  for (int64_t i = 0; i < WORDS; ++i) apart[i] = word_of({seed, sample, position}, 4 * int64_t(first) + i);
}

// u, G and the bound of G of `count` words, a multiple of 16.
extern "C" void noise(const uint32_t* word, int64_t count, float* u, double* g, float* bound) {
  for (int64_t i = 0; i < count; i += LANES) {
    u32x16 x;
    std::memcpy(&x, word + i, sizeof x);
    f32x16 most = gumbel_bound(x);
    std::memcpy(bound + i, &most, sizeof most);
    for (int64_t j = i; j < i + LANES; ++j) {
      u[j] = uniform(word[j]);
      g[j] = gumbel(word[j]);
    }
  }
}
