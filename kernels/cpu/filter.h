// The least tempered logit that each row may draw; see kernels/filters.py, whose floors these are.
//
// Top-k and top-p look at the few tokens near the greatest one: those within a reach that is widened until they are enough,
// of which the deciding one is found by partition, not by sorting. Only the mass that top-p is a share of needs every token;
// it is summed from fp32 powers, and in double where that could decide.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <vector>

#include "numbers.h"

namespace eagle {

using at::Tensor;

constexpr float NOTHING = -std::numeric_limits<float>::infinity();
constexpr float UNSURE = std::numeric_limits<float>::quiet_NaN();

// What one row rules out; `top_k` 0, `top_p` 1 and `log_min_p` -inf rule out nothing.
struct Filter {
  int64_t top_k;
  float top_p, log_min_p;
};

// How sums of e^(x - top) are made, and how far they may be off, of all there is.
struct Sums {
  float top;
  bool exact;

  double of(const float* x, int64_t count) const {
    typedef double f64x16 __attribute__((vector_size(128)));
    double total = 0;
    int64_t i = 0;
    if (!exact) {
      f64x16 sum = {};
      float powers[LANES];
      for (; i + LANES <= count; i += LANES) {
        for (int64_t j = 0; j < LANES; ++j) powers[j] = exponential(x[i + j] - top);
        sum += __builtin_convertvector(load16(powers), f64x16);
      }
      for (int64_t j = 0; j < LANES; ++j) total += sum[j];
    }
    for (; i < count; ++i) total += std::exp(double(x[i]) - double(top));
    return total;
  }
  double off() const { return exact ? 1e-11 : 1e-5 + 0x1p-22 * std::abs(top); }
};

// Those of x [count], padded to whole vectors by -inf, from `least` on.
inline void gather(const std::vector<float>& x, int64_t count, float least, std::vector<float>& found) {
  found.resize(x.size());
  float below = std::nextafter(least, NOTHING);
  int64_t size = 0;
  for (int64_t i = 0; i < count; i += LANES) {
    if (least > NOTHING && !any_above(load16(x.data() + i), below)) continue;
    for (int64_t j = i; j < std::min(count, i + LANES); ++j) {
      found[size] = x[j];
      size += x[j] >= least;
    }
  }
  found.resize(size);
}

// The least x of the smallest set of largest x whose mass reaches `share`; NaN where sums that are off by `off` could decide.
// The x, whose mass is enough, are reordered.
inline float nucleus(std::vector<float>& x, const Sums& sums, double share, double off) {
  int64_t low = 0, high = x.size();  // the one sought is among these
  double above = 0;                  // the mass of those before them
  while (high - low > 1) {
    int64_t middle = low + (high - low) / 2;
    std::nth_element(x.begin() + low, x.begin() + middle, x.begin() + high, std::greater<>());
    double before = above + sums.of(x.data() + low, middle - low);
    if (std::abs(before - share) <= off) return UNSURE;
    if (before < share) {
      above = before;
      low = middle;
    } else {
      high = middle;
    }
  }
  return x[low];
}

// The floor of a row of tempered logits x [count], padded to whole vectors by -inf, whose greatest is `top`.
inline float floor_of(const std::vector<float>& x, int64_t count, float top, const Filter& filter, std::vector<float>& near) {
  bool few = filter.top_k > 0 && filter.top_k < count, mass = filter.top_p < 1;
  float floor = top + filter.log_min_p;
  if (!few && !mass) return floor;
  Sums sums{top, few};  // exact, where only a few are added
  double total = few ? 0 : sums.of(x.data(), count);
  for (float reach : {2.0f, 4.0f, 8.0f, 16.0f, 32.0f, std::numeric_limits<float>::infinity()}) {
    gather(x, count, top - reach, near);
    int64_t size = near.size();
    if (few ? size >= filter.top_k : sums.of(near.data(), size) > total * (filter.top_p + sums.off())) break;
  }
  if (few) {
    auto kth = near.begin() + filter.top_k - 1;
    std::nth_element(near.begin(), kth, near.end(), std::greater<>());
    float least = *kth;
    floor = std::max(floor, least);
    std::erase_if(near, [&](float value) { return value < least; });
    total = sums.of(near.data(), near.size());
  }
  if (!mass) return floor;
  float found = nucleus(near, sums, filter.top_p * total, sums.off() * total);
  if (std::isnan(found) && !sums.exact) {
    sums.exact = true;
    total = sums.of(x.data(), count);
    found = nucleus(near, sums, filter.top_p * total, sums.off() * total);
  }
  return std::isnan(found) ? UNSURE : std::max(floor, found);
}

template <typename T>
void floors_of(const T* logits, int64_t vocab, float heat, const Filter& filter, std::vector<float>& x,
               std::vector<float>& near, float* out) {
  float top = as_float(logits[first_maximum(logits, vocab)]) / heat;
  if (!(heat > 0)) *out = NOTHING;
  else if (!std::isfinite(top)) *out = UNSURE;
  else {
    for (int64_t i = 0; i < vocab; ++i) {
      float tempered = as_float(logits[i]) / heat;
      x[i] = tempered == tempered ? tempered : NOTHING;
    }
    *out = floor_of(x, vocab, top, filter, near);
  }
}

// Floors fp32 [M] of logits [M, V], at temperatures fp32 [M] (0: none, -inf), with top_k int64 [M], top_p and log min_p fp32
// [M]; NaN where the rounding of sums could decide.
inline Tensor filter_floor(const Tensor& logits, const Tensor& temperature, const Tensor& top_k, const Tensor& top_p,
                           const Tensor& log_min_p) {
  Tensor x = logits.contiguous(), heat = temperature.contiguous(), k = top_k.contiguous();
  Tensor p = top_p.contiguous(), m = log_min_p.contiguous();
  int64_t count = x.size(0), vocab = x.size(1);
  Tensor out = at::empty({count}, x.options().dtype(at::kFloat));
  float* floors = out.mutable_data_ptr<float>();
  at::parallel_for(0, count, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> tempered((vocab + LANES - 1) / LANES * LANES, NOTHING), near;
    for (int64_t row = begin; row < end; ++row) {
      Filter filter{k.const_data_ptr<int64_t>()[row], p.const_data_ptr<float>()[row], m.const_data_ptr<float>()[row]};
      auto run = [&](const auto* all) {
        floors_of(all + row * vocab, vocab, heat.const_data_ptr<float>()[row], filter, tempered, near, floors + row);
      };
      if (x.scalar_type() == at::kFloat) run(x.const_data_ptr<float>());
      else run((const uint16_t*)x.const_data_ptr());
    }
  });
  return out;
}

}  // namespace eagle
