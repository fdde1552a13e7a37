// Gumbel noise keyed by position; see kernels/noise.py, whose words these are bit for bit.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>

#include "numbers.h"

namespace eagle {

constexpr int64_t WORDS = 4 * LANES;  // of one call of `words_from`
constexpr float GUMBEL_MAX = 22.88f;

struct Key {
  int64_t seed, sample, position;  // of the token that is drawn
  bool operator==(const Key&) const = default;
};

template <typename Words>
struct Wide {
  Words high, low;
};

// The halves of the 64-bit products of words and a number.
inline Wide<uint32_t> product(uint32_t x, uint32_t by) {
  uint64_t wide = uint64_t(x) * by;
  return {uint32_t(wide >> 32), uint32_t(wide)};
}
inline Wide<u32x16> product(u32x16 x, uint32_t by) {
  Wide<u32x16> out;
#if defined(__AVX512F__)
  __m512i factor = _mm512_set1_epi32(int32_t(by)), odd = _mm512_mul_epu32(_mm512_srli_epi64((__m512i)x, 32), factor);
  __m512i even = _mm512_mul_epu32((__m512i)x, factor);
  out.low = (u32x16)_mm512_mask_blend_epi32(0xaaaa, even, _mm512_slli_epi64(odd, 32));
  out.high = (u32x16)_mm512_mask_blend_epi32(0xaaaa, _mm512_srli_epi64(even, 32), odd);
#else
  for (int i = 0; i < LANES; ++i) {
    Wide<uint32_t> one = product(x[i], by);
    out.high[i] = one.high;
    out.low[i] = one.low;
  }
#endif
  return out;
}

// Ten rounds of Philox4x32 on four words, of one counter or of 16.
template <typename Words>
inline void philox(Words x[4], uint64_t key) {
  uint32_t low = uint32_t(key), high = uint32_t(key >> 32);
#pragma GCC unroll 10
  for (int round = 0; round < 10; ++round) {
    auto p = product(x[0], 0xD2511F53u), q = product(x[2], 0xCD9E8D57u);
    x[0] = q.high ^ x[1] ^ low;
    x[2] = p.high ^ x[3] ^ high;
    x[1] = q.low;
    x[3] = p.low;
    low += 0x9E3779B9u;
    high += 0xBB67AE85u;
  }
}

// Words of 16 counters first, first + 1, ...: those of the tokens 4 i, 4 i + 1, 4 i + 2, 4 i + 3 of each counter i.
inline void words_from(const Key& key, uint32_t first, u32x16 words[4]) {
  for (int i = 0; i < LANES; ++i) words[0][i] = first + i;
  words[1] = u32x16{} + uint32_t(key.position);
  words[2] = u32x16{} + uint32_t(key.sample);
  words[3] = u32x16{};
  philox(words, key.seed);
}

// The same in the order of their tokens.
inline void interleave(u32x16 w[4]) {
#if defined(__AVX512F__)
  __m512i ab = _mm512_unpacklo_epi32((__m512i)w[0], (__m512i)w[1]), AB = _mm512_unpackhi_epi32((__m512i)w[0], (__m512i)w[1]);
  __m512i cd = _mm512_unpacklo_epi32((__m512i)w[2], (__m512i)w[3]), CD = _mm512_unpackhi_epi32((__m512i)w[2], (__m512i)w[3]);
  // Each has one counter of every quarter: 0 4 8 12, 1 5 9 13, 2 6 10 14, 3 7 11 15.
  __m512i q0 = _mm512_unpacklo_epi64(ab, cd), q1 = _mm512_unpackhi_epi64(ab, cd);
  __m512i q2 = _mm512_unpacklo_epi64(AB, CD), q3 = _mm512_unpackhi_epi64(AB, CD);
  __m512i s0 = _mm512_shuffle_i32x4(q0, q1, 0x44), s1 = _mm512_shuffle_i32x4(q0, q1, 0xee);
  __m512i s2 = _mm512_shuffle_i32x4(q2, q3, 0x44), s3 = _mm512_shuffle_i32x4(q2, q3, 0xee);
  w[0] = (u32x16)_mm512_shuffle_i32x4(s0, s2, 0x88);
  w[1] = (u32x16)_mm512_shuffle_i32x4(s0, s2, 0xdd);
  w[2] = (u32x16)_mm512_shuffle_i32x4(s1, s3, 0x88);
  w[3] = (u32x16)_mm512_shuffle_i32x4(s1, s3, 0xdd);
#else
  u32x16 out[4];
  for (int i = 0; i < 4 * LANES; ++i) out[i / LANES][i % LANES] = w[i % 4][i / 4];
  for (int j = 0; j < 4; ++j) w[j] = out[j];
#endif
}

// The word of one token.
inline uint32_t word_of(const Key& key, int64_t token) {
  uint32_t words[4] = {uint32_t(token >> 2), uint32_t(key.position), uint32_t(key.sample), 0};
  philox(words, key.seed);
  return words[token & 3];
}

// The fp32 number that a word stands for, in (0, 1), rounded as in the reference.
inline float uniform(uint32_t word) {
  return std::min((float(word) + 0.5f) * 0x1p-32f, 1.0f - 0x1p-24f);
}

// G of that number, to double precision: within a few units in the last place of what any fp32 logarithms make of it.
inline double gumbel(uint32_t word) { return -std::log(-std::log1p(-double(uniform(word)))); }

// Not less than G: -log(-log1p(-v)) <= -log v, and log2 is concave between powers of two. At most 0.06 above -log v.
inline f32x16 gumbel_bound(u32x16 word) {
#if defined(__AVX512F__)
  f32x16 v = (f32x16)_mm512_cvtepu32_ps((__m512i)word) + 0.5f;
#else
  f32x16 v = __builtin_convertvector(word, f32x16) + 0.5f;
#endif
  typedef int32_t i32x16 __attribute__((vector_size(64)));
  f32x16 bits = __builtin_convertvector((159 << 23) - std::bit_cast<i32x16>(v), f32x16);
  return bits * (0.69314718f * 0x1p-23f);
}

}  // namespace eagle
