// The best children of drafted nodes, and how strongly the target's noise should have counted; see
// stages/decoding/drafters/ranking.py and strength.py, whose formulas these are.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <tuple>
#include <utility>
#include <vector>

#include "noise.h"

namespace eagle {

using at::Tensor;
using Scored = std::pair<float, int64_t>;

// The `most` greatest of x, the first of equal ones first; x has `count` values and is padded to whole vectors by -inf.
inline void greatest(const float* x, int64_t count, int64_t most, std::vector<Scored>& best) {
  auto before = [](const Scored& a, const Scored& b) { return a.first != b.first ? a.first > b.first : a.second < b.second; };
  best.clear();
  int64_t i = 0;
  for (; i < std::min(most, count); ++i) best.push_back({x[i], i});
  std::make_heap(best.begin(), best.end(), before);  // the least in front
  auto offer = [&](int64_t at) {
    if (!(x[at] > best.front().first)) return;
    std::pop_heap(best.begin(), best.end(), before);
    best.back() = {x[at], at};
    std::push_heap(best.begin(), best.end(), before);
  };
  for (; i < count && i % LANES; ++i) offer(i);
  for (; i < count; i += LANES)
    if (any_above(load16(x + i), best.front().first))
      for (int64_t j = i; j < std::min(count, i + LANES); ++j) offer(j);
  std::sort_heap(best.begin(), best.end(), before);
}

// log sum e^x of `count` values, which are overwritten, as is what pads them to whole vectors.
inline float log_sum_exp(float* x, int64_t count) {
  int64_t padded = (count + LANES - 1) / LANES * LANES;
  for (int64_t i = count; i < padded; ++i) x[i] = -std::numeric_limits<float>::infinity();
  f32x16 top = load16(x);
  for (int64_t i = LANES; i < padded; i += LANES) {
    f32x16 here = load16(x + i);
    top = here > top ? here : top;
  }
  float most = highest(top);
  f32x16 sum = {};
#pragma GCC ivdep
  for (int64_t i = 0; i < padded; ++i) x[i] = x[i] > -std::numeric_limits<float>::infinity() ? exponential(x[i] - most) : 0.0f;
  for (int64_t i = 0; i < padded; i += LANES) sum += load16(x + i);
  float total = 0;
  for (int64_t lane = 0; lane < LANES; ++lane) total += sum[lane];
  return most + std::log(total);
}

inline std::vector<float> padded(int64_t count) {
  return std::vector<float>((count + LANES - 1) / LANES * LANES, -std::numeric_limits<float>::infinity());
}

inline double log_add_exp(double a, double b) { return std::max(a, b) + std::log1p(std::exp(-std::abs(a - b))); }

// Where the noise of one node counts: its strength, and the place of the node's children.
struct Noise {
  float strength;
  Key key;
};

struct Children {
  int64_t* tokens;
  float* scores;
};

// The tokens that were given noise.
struct Pooled {
  int64_t* ids;
  float *log_probs, *noise;
};

template <typename T>
void rank_row(const T* logits, int64_t vocab, const int64_t* ids, float temperature, const Noise& noise, int64_t pool,
              int64_t width, const Children& out, const Pooled& pooled) {
  bool hot = temperature > 0;
  std::vector<float> z = padded(vocab), work;
  std::vector<Scored> best;
  float heat = hot ? temperature : 1.0f;
  for (int64_t i = 0; i < vocab; ++i) {
    float tempered = as_float(logits[i]) / heat;
    z[i] = tempered == tempered ? tempered : -std::numeric_limits<float>::infinity();  // NaN has no order
  }
  greatest(z.data(), vocab, hot ? pool : width, best);
  float sum = log_sum_exp(z.data(), vocab);
  if (!hot) {
    for (int64_t i = 0; i < width; ++i) {
      out.tokens[i] = ids[best[i].second];
      out.scores[i] = best[i].first - sum;
    }
    return;
  }
  std::vector<float> noisy = padded(pool);
  double inside = 0;
  for (int64_t i = 0; i < pool; ++i) {
    pooled.ids[i] = ids[best[i].second];
    pooled.log_probs[i] = best[i].first - sum;
    pooled.noise[i] = float(gumbel(word_of(noise.key, pooled.ids[i])));
    noisy[i] = pooled.log_probs[i] + noise.strength * pooled.noise[i];
    inside += std::exp(double(pooled.log_probs[i]));
  }
  greatest(noisy.data(), pool, width, best);
  double outside = std::log(std::max(1.0 - inside, 1e-9)) + std::lgamma(1.0 - std::min(noise.strength, 0.9f));
  float all = float(log_add_exp(log_sum_exp(noisy.data(), pool), outside));
  for (int64_t i = 0; i < width; ++i) {
    out.tokens[i] = pooled.ids[best[i].second];
    out.scores[i] = best[i].first - all;
  }
}

// The `width` best children of R nodes with logits [R, Vd]: target ids int64 and log-probabilities fp32 [R, width], and of
// nodes at a temperature the `pool` most probable tokens: target ids, log-probabilities, noise [R, pool].
inline std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> rank(const Tensor& logits, const Tensor& draft_ids,
                                                               at::ArrayRef<double> temperature, at::ArrayRef<double> strength,
                                                               at::IntArrayRef seed, at::IntArrayRef sample,
                                                               at::IntArrayRef position, int64_t pool, int64_t width) {
  Tensor x = logits.contiguous(), ids = draft_ids.contiguous();
  int64_t rows = x.size(0), vocab = x.size(1);
  auto whole = x.options().dtype(at::kLong), real = x.options().dtype(at::kFloat);
  Tensor tokens = at::empty({rows, width}, whole), scores = at::empty({rows, width}, real);
  Tensor pool_ids = at::empty({rows, pool}, whole), log_probs = at::empty({rows, pool}, real);
  Tensor noise = at::empty({rows, pool}, real);
  int64_t *out = tokens.mutable_data_ptr<int64_t>(), *pooled = pool_ids.mutable_data_ptr<int64_t>();
  float *score = scores.mutable_data_ptr<float>(), *log_prob = log_probs.mutable_data_ptr<float>();
  float* added = noise.mutable_data_ptr<float>();
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      auto run = [&](const auto* all) {
        rank_row(all + row * vocab, vocab, ids.const_data_ptr<int64_t>(), float(temperature[row]),
                 {float(strength[row]), {seed[row], sample[row], position[row]}}, pool, width,
                 {out + row * width, score + row * width}, {pooled + row * pool, log_prob + row * pool, added + row * pool});
      };
      if (x.scalar_type() == at::kFloat) run(x.const_data_ptr<float>());
      else run((const uint16_t*)x.const_data_ptr());
    }
  });
  return {tokens, scores, pool_ids, log_probs, noise};
}

// log-softmax(a * (log q + s * G)) of one token of a pool [P], for each strength s and factor a: float64 [S, A].
inline Tensor likelihoods(const Tensor& log_probs, const Tensor& noise, int64_t token, at::ArrayRef<double> strengths,
                          at::ArrayRef<double> factors) {
  Tensor q = log_probs.contiguous(), g = noise.contiguous();
  int64_t count = q.numel();
  Tensor out = at::empty({int64_t(strengths.size()), int64_t(factors.size())}, q.options().dtype(at::kDouble));
  std::vector<float> z = padded(count);
  const float *likely = q.const_data_ptr<float>(), *added = g.const_data_ptr<float>();
  double* to = out.mutable_data_ptr<double>();
  for (double s : strengths)
    for (double a : factors) {
      for (int64_t i = 0; i < count; ++i) z[i] = float(a) * (float(s) * added[i] + likely[i]);
      float own = z[token];
      *to++ = own - log_sum_exp(z.data(), count);
    }
  return out;
}

}  // namespace eagle
