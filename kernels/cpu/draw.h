// The target's own tokens, argmax(x / T + G) over the x / T from a floor on; see kernels/accept.py.
//
// A row is read once. A token is given its logarithms only where a bound of its score, made of its word's bits, exceeds the
// best score so far: those of a few dozen tokens of a large vocabulary. What is left is a Philox call for every four tokens
// of the blocks that are not out of reach as a whole, once for all rows of one key.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>

#include <limits>
#include <mutex>
#include <optional>
#include <vector>

#include "filter.h"
#include "linear.h"
#include "noise.h"

namespace eagle {

using at::Tensor;

// One row's best token so far. `rival` is the best score of any other token.
struct Leader {
  double score, rival;
  int64_t token;

  void meet(double other, int64_t at) {
    if (at == token) return;
    if (other > score) {
      rival = score;
      score = other;
      token = at;
    } else {
      rival = std::max(rival, other);
    }
  }
  void merge(const Leader& other) {
    meet(other.score, other.token);
    rival = std::max(rival, other.rival);
  }
};

// Scores nearer than this may change places when logarithms and sums are rounded to fp32: both by some 5 units in the last
// place of the noise, and half a unit of the sum.
inline double doubt(double score) { return 2.5e-5 + 0x1p-21 * std::abs(score); }

// Rows of one key, over `count` tokens from the `first` on, up to 64; row m's logits begin at m * stride.
template <typename T>
void draw_block(const T* logits, int64_t stride, int64_t first, int64_t count, const std::vector<int64_t>& rows,
                const float* heat, const float* floors, const Key& key, Leader* leaders) {
  u32x16 words[4];
  bool made = false;
  for (int64_t row : rows) {
    Leader& leader = leaders[row];
    const T* from = logits + row * stride;
    float scale = 1.0f / heat[row];
    // Scaled here by a product in place of a quotient, and bounded in fp32.
    float beaten = float(leader.score) - 2e-3f - 0x1p-20f * std::abs(float(leader.score));
    float ruled_out = floors[row] - 1e-6f - 0x1p-20f * std::abs(floors[row]);
    f32x16 x[4];
    if (count == WORDS) {
      for (int j = 0; j < 4; ++j) x[j] = load16(from + j * LANES) * scale;
    } else {
      for (int i = 0; i < WORDS; ++i)
        x[i / LANES][i % LANES] = i < count ? as_float(from[i]) * scale : -std::numeric_limits<float>::infinity();
    }
    f32x16 top = f32x16{} + NOTHING;
    for (int j = 0; j < 4; ++j) top = x[j] > top ? x[j] : top;  // NaN is never the greater one
    if (!any_above(top, std::max(beaten - GUMBEL_MAX, ruled_out))) continue;
    if (!made) {
      words_from(key, uint32_t(first / 4), words);
      interleave(words);
      made = true;
    }
    for (int j = 0; j < 4; ++j) {
      f32x16 bound = x[j] + gumbel_bound(words[j]);
      if (!any_above(bound, beaten)) continue;
      for (int i = 0; i < LANES; ++i) {
        int64_t at = j * LANES + i;
        if (!(bound[i] > beaten)) continue;
        float tempered = as_float(from[at]) / heat[row];
        if (tempered >= floors[row]) leader.meet(double(tempered) + gumbel(words[j][i]), first + at);
      }
    }
  }
}

// Rows of one key, over blocks of 64 tokens.
template <typename T>
void draw_rows(const T* logits, int64_t vocab, const std::vector<int64_t>& rows, const float* heat, const float* floors,
               const Key& key, int64_t begin, int64_t end, Leader* leaders) {
  for (int64_t block = begin; block < end; ++block) {
    int64_t first = block * WORDS;
    draw_block(logits + first, vocab, first, std::min(WORDS, vocab - first), rows, heat, floors, key, leaders);
  }
}

inline std::vector<std::vector<int64_t>> rows_by_key(const std::vector<Key>& keys, const float* heat) {
  std::vector<std::vector<int64_t>> groups;
  for (size_t row = 0; row < keys.size(); ++row) {
    if (!(heat[row] > 0)) continue;
    auto same = std::find_if(groups.begin(), groups.end(), [&](auto& group) { return keys[group[0]] == keys[row]; });
    if (same == groups.end()) groups.push_back({int64_t(row)});
    else same->push_back(row);
  }
  return groups;
}

// Tokens of `count` rows, a temperature, a floor and a key each.
template <typename T>
void draw_all(const T* logits, int64_t count, int64_t vocab, const float* heat, const float* floors,
              const std::vector<Key>& keys, int64_t* out) {
  std::vector<Leader> leaders(count);
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* x = logits + row * vocab;
      int64_t peak = first_maximum(x, vocab);
      double score = heat[row] > 0 ? double(as_float(x[peak]) / heat[row]) + gumbel(word_of(keys[row], peak)) : 0;
      leaders[row] = {score, -std::numeric_limits<double>::infinity(), peak};
    }
  });
  std::vector<std::vector<int64_t>> groups = rows_by_key(keys, heat);
  if (!groups.empty()) {
    std::mutex lock;
    at::parallel_for(0, (vocab + WORDS - 1) / WORDS, 64, [&](int64_t begin, int64_t end) {
      std::vector<Leader> own = leaders;
      for (const auto& group : groups) draw_rows(logits, vocab, group, heat, floors, keys[group[0]], begin, end, own.data());
      std::lock_guard<std::mutex> guard(lock);
      for (const auto& group : groups)
        for (int64_t row : group) leaders[row].merge(own[row]);
    });
  }
  for (int64_t row = 0; row < count; ++row) {
    const Leader& leader = leaders[row];
    bool sure = !(heat[row] > 0) || leader.score - leader.rival > doubt(leader.score);
    out[row] = sure ? leader.token : -1;
  }
}

// Tokens int64 [M] drawn from logits [M, V], at temperatures fp32 [M] (0: the first maximum) with keys int64 [M] and, where
// tempered logits are filtered, floors fp32 [M]; -1 where two tokens are so near each other that the rounding of fp32
// logarithms and sums decides.
inline Tensor draw(const Tensor& logits, const Tensor& temperature, const Tensor& seed, const Tensor& sample,
                   const Tensor& position, const std::optional<Tensor>& floor) {
  Tensor x = logits.contiguous(), heat = temperature.contiguous(), seeds = seed.contiguous();
  Tensor floors = floor ? floor->contiguous() : at::full({x.size(0)}, NOTHING, heat.options());
  Tensor samples = sample.contiguous(), positions = position.contiguous();
  int64_t count = x.size(0), vocab = x.size(1);
  Tensor out = at::empty({count}, x.options().dtype(at::kLong));
  std::vector<Key> keys;
  for (int64_t row = 0; row < count; ++row)
    keys.push_back({seeds.const_data_ptr<int64_t>()[row], samples.const_data_ptr<int64_t>()[row],
                    positions.const_data_ptr<int64_t>()[row]});
  auto run = [&](const auto* all) {
    draw_all(all, count, vocab, heat.const_data_ptr<float>(), floors.const_data_ptr<float>(), keys,
             out.mutable_data_ptr<int64_t>());
  };
  if (x.scalar_type() == at::kFloat) run(x.const_data_ptr<float>());
  else run((const uint16_t*)x.const_data_ptr());
  return out;
}

// The first greatest value's index along the last dimension, int64 [...] of [..., V].
inline Tensor argmax(const Tensor& values) {
  Tensor x = values.contiguous();
  auto sizes = x.sizes().vec();
  int64_t width = sizes.back();
  sizes.pop_back();
  Tensor out = at::empty(sizes, x.options().dtype(at::kLong));
  int64_t* found = out.mutable_data_ptr<int64_t>();
  at::parallel_for(0, out.numel(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t m = begin; m < end; ++m)
      found[m] = x.scalar_type() == at::kFloat ? first_maximum(x.const_data_ptr<float>() + m * width, width)
                                               : first_maximum((const uint16_t*)x.const_data_ptr() + m * width, width);
  });
  return out;
}

// The first greatest output of a linear layer, as argmax finds it of what `linear` returns: M of x [M, K]. The outputs are not
// kept.
template <typename T>
void greatest_outputs(const T* x, int64_t rows, int64_t width, const T* packed, const T* bias, int64_t outputs, int64_t* found) {
  constexpr float LEAST = -std::numeric_limits<float>::infinity();
  std::vector<float> best(rows, LEAST);
  std::fill(found, found + rows, 0);
  std::mutex lock;
  at::parallel_for(0, (outputs + BLOCK - 1) / BLOCK, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> local;
    std::vector<float> own(rows, LEAST);
    std::vector<int64_t> at(rows, 0);
    auto meet = [&](int64_t m, float value, int64_t output) {
      if (value > own[m]) own[m] = value, at[m] = output;
    };
    multiply_blocks(x, rows, width, packed, bias, outputs, begin, end, local,
                    [&](int64_t first, const T* out, int64_t stride, int64_t count) {
                      for (int64_t m = 0; m < rows; ++m) {
                        const T* from = out + m * stride;
                        int64_t i = 0;
                        for (; i + LANES <= count; i += LANES)
                          if (any_above(load16(from + i), own[m]))
                            for (int64_t j = i; j < i + LANES; ++j) meet(m, as_float(from[j]), first + j);
                        for (; i < count; ++i) meet(m, as_float(from[i]), first + i);
                      }
                    });
    std::lock_guard<std::mutex> guard(lock);
    for (int64_t m = 0; m < rows; ++m)
      if (own[m] > best[m] || (own[m] == best[m] && own[m] > LEAST && at[m] < found[m])) best[m] = own[m], found[m] = at[m];
  });
}

inline std::vector<int64_t> linear_argmax(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias,
                                          int64_t outputs) {
  Tensor x = input.contiguous();
  check_width(x, packed, outputs);
  int64_t rows = x.size(0), width = x.size(1);
  std::vector<int64_t> out(rows);
  int64_t* found = out.data();
  const void* added = bias ? bias->const_data_ptr() : nullptr;
  if (x.scalar_type() == at::kFloat)
    greatest_outputs(x.const_data_ptr<float>(), rows, width, packed.const_data_ptr<float>(), (const float*)added, outputs, found);
  else
    greatest_outputs((const uint16_t*)x.const_data_ptr(), rows, width, (const uint16_t*)packed.const_data_ptr(),
                     (const uint16_t*)added, outputs, found);
  return out;
}

// Tokens drawn, all at temperatures above 0, from the outputs of a linear layer, which are not kept; else as `draw`.
template <typename T>
void draw_outputs(const T* x, int64_t rows, int64_t width, const T* packed, const T* bias, int64_t outputs,
                  const std::vector<float>& heat, const std::vector<Key>& keys, int64_t* found) {
  static_assert(BLOCK == WORDS, "a block of outputs has the words of one");
  const Leader none{NOTHING, NOTHING, -1};
  std::vector<Leader> leaders(rows, none);
  std::vector<std::vector<int64_t>> groups = rows_by_key(keys, heat.data());
  std::vector<float> floors(rows, NOTHING);
  std::mutex lock;
  at::parallel_for(0, (outputs + BLOCK - 1) / BLOCK, 1, [&](int64_t begin, int64_t end) {
    std::vector<T> local;
    std::vector<Leader> own(rows, none);
    multiply_blocks(x, rows, width, packed, bias, outputs, begin, end, local,
                    [&](int64_t first, const T* out, int64_t stride, int64_t count) {
                      for (int64_t at = 0; at < count; at += WORDS)
                        for (const auto& group : groups)
                          draw_block(out + at, stride, first + at, std::min(WORDS, count - at), group, heat.data(),
                                     floors.data(), keys[group[0]], own.data());
                    });
    std::lock_guard<std::mutex> guard(lock);
    for (int64_t row = 0; row < rows; ++row) leaders[row].merge(own[row]);
  });
  for (int64_t row = 0; row < rows; ++row)
    found[row] = leaders[row].score - leaders[row].rival > doubt(leaders[row].score) ? leaders[row].token : -1;
}

// temperature, seed, sample: of each row, or one of all.
inline std::vector<int64_t> linear_draw(const Tensor& input, const Tensor& packed, const std::optional<Tensor>& bias,
                                        int64_t outputs, at::ArrayRef<double> temperature, at::IntArrayRef seed,
                                        at::IntArrayRef sample, at::IntArrayRef position) {
  Tensor x = input.contiguous();
  check_width(x, packed, outputs);
  int64_t rows = x.size(0), width = x.size(1);
  size_t given = temperature.size();
  TORCH_CHECK((int64_t(given) == rows || given == 1) && seed.size() == given && sample.size() == given &&
                  int64_t(position.size()) == rows, "a row has no key");
  std::vector<float> heat;
  std::vector<Key> keys;
  for (int64_t row = 0; row < rows; ++row) {
    size_t at = given == 1 ? 0 : row;
    heat.push_back(float(temperature[at]));
    keys.push_back({seed[at], sample[at], position[row]});
    TORCH_CHECK(heat[row] > 0, "greedy rows are not drawn");
  }
  std::vector<int64_t> out(rows);
  const void* added = bias ? bias->const_data_ptr() : nullptr;
  if (x.scalar_type() == at::kFloat)
    draw_outputs(x.const_data_ptr<float>(), rows, width, packed.const_data_ptr<float>(), (const float*)added, outputs, heat, keys,
                 out.data());
  else
    draw_outputs((const uint16_t*)x.const_data_ptr(), rows, width, (const uint16_t*)packed.const_data_ptr(),
                 (const uint16_t*)added, outputs, heat, keys, out.data());
  return out;
}

}  // namespace eagle
