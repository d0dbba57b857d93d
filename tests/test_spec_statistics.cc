// What counts as accepted, and the intervals over prompts.
#include <catch2/catch.hpp>

#include <algorithm>

#include "spec/statistics.h"

using namespace dspark;
using namespace dspark::spec;

namespace {

Round round(int64_t proposed, int64_t accepted, std::vector<int32_t> tokens, bool ended = false, bool cut = false) {
  return {.proposed = proposed, .accepted = accepted, .tokens = std::move(tokens), .ended = ended, .cut = cut};
}

PromptStats prompt(int64_t rounds, int64_t length_sum) {
  PromptStats s;
  s.rounds = rounds;
  s.length_sum = length_sum;
  return s;
}

using Numbers = std::vector<int64_t>;

}  // namespace

TEST_CASE("a round counts its accepted tokens and the one that comes free", "[spec]") {
  Decoded d;
  d.seconds = 2.5;
  d.rounds = {round(3, 0, {4}), round(3, 2, {4, 5, 6}), round(3, 3, {4, 5, 6, 7})};
  const PromptStats s = prompt_stats(d, 3);
  CHECK(s.rounds == 3);
  CHECK(s.cut == 0);
  CHECK(s.length_sum == 1 + 3 + 4);
  CHECK(s.tokens == 8);
  CHECK(s.seconds == 2.5);
  CHECK(s.accepted_length() == Approx(8.0 / 3));
  CHECK(s.proposed == Numbers{3, 3, 3});
  CHECK(s.accepted == Numbers{2, 2, 1});
}

TEST_CASE("a round ended by an accepted end token counts what was accepted up to it", "[spec]") {
  Decoded d;
  d.rounds = {round(4, 3, {5, 0}, true)};  // three would have been accepted, the second is the end
  const PromptStats s = prompt_stats(d, 4);
  CHECK(s.rounds == 1);
  CHECK(s.length_sum == 2);
  CHECK(s.proposed == Numbers{1, 1, 0, 0});
  CHECK(s.accepted == Numbers{1, 1, 0, 0});

  d.rounds = {round(4, 1, {5, 0}, true)};  // the end token is the resampled one: nothing special
  const PromptStats r = prompt_stats(d, 4);
  CHECK(r.length_sum == 2);
  CHECK(r.proposed == Numbers{1, 1, 1, 1});
  CHECK(r.accepted == Numbers{1, 0, 0, 0});
}

TEST_CASE("a round cut by the token limit is left out of accepted length", "[spec]") {
  Decoded d;
  d.rounds = {round(3, 1, {4, 5}), round(3, 3, {4, 5}, false, true)};
  const PromptStats s = prompt_stats(d, 3);
  CHECK(s.rounds == 1);
  CHECK(s.cut == 1);
  CHECK(s.length_sum == 2);
  CHECK(s.tokens == 4);  // they were generated all the same
  CHECK(s.proposed == Numbers{1, 1, 1});
  CHECK(s.accepted == Numbers{1, 0, 0});

  d.rounds = {round(3, 3, {4}, false, true)};
  CHECK(prompt_stats(d, 3).rounds == 0);
  CHECK(prompt_stats(d, 3).accepted_length() == 0);
}

TEST_CASE("totals add prompts up", "[spec]") {
  Decoded a, b;
  a.rounds = {round(2, 1, {4, 5})};
  b.rounds = {round(3, 3, {4, 5, 6, 7}), round(3, 3, {4}, false, true)};
  a.seconds = 1, b.seconds = 2;
  const std::vector<PromptStats> all{prompt_stats(a, 2), prompt_stats(b, 3)};
  const PromptStats t = total(all);
  CHECK(t.rounds == 2);
  CHECK(t.cut == 1);
  CHECK(t.length_sum == 6);
  CHECK(t.tokens == 7);
  CHECK(t.seconds == 3);
  CHECK(t.proposed == Numbers{2, 2, 1});
  CHECK(t.accepted == Numbers{2, 1, 1});
  CHECK(total({}).rounds == 0);
}

TEST_CASE("accepted length is by rounds, its interval by prompts", "[spec]") {
  // Means by rounds and by prompts differ: 100 rounds of 1.5 and 10 of 4.
  const std::vector<PromptStats> two{prompt(100, 150), prompt(10, 40)};
  const Interval i = accepted_length(two, 1);
  CHECK(i.mean == Approx(190.0 / 110));
  CHECK(i.low == Approx(1.5));  // both draws the first prompt: a quarter of the resamples
  CHECK(i.high == Approx(4.0));

  std::vector<PromptStats> many;
  for (int64_t k = 0; k < 40; ++k) many.push_back(prompt(10, 15 + (k * 7) % 20));
  const Interval m = accepted_length(many, 3), again = accepted_length(many, 3), other = accepted_length(many, 4);
  CHECK(m.mean == Approx(2.45));
  CHECK(m.low < m.mean);
  CHECK(m.mean < m.high);
  // Standard error of the mean of 40 values, uniform on 20 steps of 0.1: 0.0912; 1.96 of them either side.
  CHECK(m.high - m.low == Approx(2 * 1.96 * 0.0912).epsilon(0.1));
  CHECK(again.low == m.low);
  CHECK(again.high == m.high);
  CHECK((other.low != m.low || other.high != m.high));
  CHECK(other.mean == m.mean);

  const Interval one = accepted_length(std::vector<PromptStats>{prompt(4, 10)}, 1), none = accepted_length({}, 1);
  CHECK(one.low == 2.5);
  CHECK(one.high == 2.5);
  CHECK(none.mean == 0);
}

TEST_CASE("drafters are compared prompt by prompt", "[spec]") {
  // Differences 0.5, 0.5, 0.5; the prompt that one of them never finished a round of is left out.
  const std::vector<PromptStats> a{prompt(2, 5), prompt(10, 15), prompt(4, 18), prompt(0, 0), prompt(1, 9)};
  const std::vector<PromptStats> b{prompt(4, 8), prompt(5, 5), prompt(2, 8), prompt(3, 9), prompt(0, 0)};
  const Interval d = paired_difference(a, b, 1);
  CHECK(d.mean == Approx(0.5));  // though the prompts' own lengths differ by far more
  CHECK(d.low == Approx(0.5));
  CHECK(d.high == Approx(0.5));
  const Interval back = paired_difference(b, a, 1);
  CHECK(back.mean == Approx(-0.5));

  std::vector<PromptStats> c{prompt(1, 3), prompt(1, 2), prompt(1, 5), prompt(1, 4)}, e{prompt(1, 1), prompt(1, 1), prompt(1, 2), prompt(1, 4)};
  const Interval mixed = paired_difference(c, e, 2);  // 2, 1, 3, 0
  CHECK(mixed.mean == Approx(1.5));
  CHECK(mixed.low >= 0);
  CHECK(mixed.low < 1.5);
  CHECK(mixed.high > 1.5);
  CHECK(mixed.high <= 3);
}
