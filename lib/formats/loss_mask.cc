#include "formats/loss_mask.h"

#include <algorithm>
#include <ctime>
#include <nlohmann/json.hpp>

#include "core/error.h"
#include "core/hash.h"

namespace dspark::formats {

namespace {

constexpr std::string_view kSpaces = " \t\r\n";

size_t common_prefix(std::string_view a, std::string_view b) {
  return static_cast<size_t>(
      std::mismatch(a.begin(), a.begin() + static_cast<ptrdiff_t>(std::min(a.size(), b.size())), b.begin()).first -
      a.begin());
}

OrderedJson first_messages(const OrderedJson& messages, size_t n) {
  OrderedJson out = OrderedJson::array();
  for (size_t i = 0; i < n; ++i) out.push_back(messages[i]);
  return out;
}

// One assistant turn in the text of the conversation up to and with it.
class Turn {
 public:
  Turn(const OrderedJson& messages, size_t index, const OrderedJson* tools, const Render& render,
       const Tokenizer& tokenizer)
      : before_(first_messages(messages, index)), tools_(tools), render_(render) {
    text_ = render(first_messages(messages, index + 1), tools, false);
    begin_ = find_begin();
    end_ = find_end(tokenizer);
  }
  const std::string& text() const { return text_; }
  std::pair<size_t, size_t> range() const { return {begin_, end_}; }

 private:
  // The same conversation with a plain answer of this text.
  std::string with_answer(const char* content) const {
    OrderedJson list = before_;
    list.push_back({{"role", "assistant"}, {"content", content}});
    return render_(list, tools_, false);
  }
  // Two answers that share nothing: what their conversations share is what stands before the content.
  size_t content_begin() const { return common_prefix(with_answer("0dspark"), with_answer("1dspark")); }

  size_t find_begin() const {
    // Some templates can't render nothing at all; an answer in the first place has its header found below.
    const std::string prompt = before_.empty() ? std::string() : render_(before_, tools_, true);
    const bool has_prompt = !before_.empty() && prompt != render_(before_, tools_, false);
    if (has_prompt && text_.starts_with(prompt)) return prompt.size();
    const size_t content = std::min(content_begin(), text_.size());
    if (has_prompt) {
      // The prompt goes on (an opened <think>, say) where this answer does not: the answer begins where they part, and
      // not inside its own content if that happens to begin as the prompt does.
      return std::min(common_prefix(prompt, text_), content);
    }
    // A template without a generation prompt. Either the turn has a header, which is not the model's, or the prompt
    // just goes on after the last message ("[/INST]"), and white space before the content is part of the answer.
    const size_t shared = common_prefix(prompt, text_);
    if (!before_.empty() && shared == prompt.size() && text_.find_first_not_of(kSpaces, shared) >= content)
      return shared;
    return content;
  }

  size_t find_end(const Tokenizer& tokenizer) const {
    // The last token with a meaning of its own, when nothing but white space follows.
    const size_t last = text_.find_last_not_of(kSpaces);
    if (last == std::string::npos || last < begin_) return begin_;
    const Encoding encoding = tokenizer.encode_spans(std::string_view(text_).substr(begin_));
    for (size_t i = encoding.ids.size(); i-- > 0;) {
      const size_t end = begin_ + encoding.spans[i].second;
      if (end <= last) break;
      if (tokenizer.type(encoding.ids[i]) == TokenType::control || tokenizer.is_end(encoding.ids[i])) return end;
    }
    // No such token: what the template writes after any content, without white space at its end, closes the turn.
    const std::string sample = with_answer("0dspark");
    const size_t at = sample.rfind("0dspark");
    if (at == std::string::npos) return last + 1;
    const std::string suffix = sample.substr(at + 7);
    if (!text_.ends_with(suffix) || text_.size() - suffix.size() < begin_) return last + 1;
    const size_t kept = suffix.find_last_not_of(kSpaces);
    return text_.size() - suffix.size() + (kept == std::string::npos ? 0 : kept + 1);
  }

  OrderedJson before_;
  const OrderedJson* tools_;
  const Render& render_;
  std::string text_;
  size_t begin_ = 0, end_ = 0;
};

bool is_answer(const OrderedJson& message) { return message.at("role") == "assistant"; }

}  // namespace

Render chat_renderer(const ChatTemplate& chat, const Tokenizer& tokenizer, ChatOptions options) {
  if (tokenizer.bos() >= 0) options.bos_token = tokenizer.text(tokenizer.bos());
  if (tokenizer.eos() >= 0) options.eos_token = tokenizer.text(tokenizer.eos());
  // A template that prints the date must print the same one in every part of a conversation.
  if (!options.now) {
    const std::time_t seconds = std::time(nullptr);
    std::tm local{};
    DS_ASSERT(localtime_r(&seconds, &local));
    options.now = local;
  }
  return [&chat, options](const OrderedJson& messages, const OrderedJson* tools, bool add_generation_prompt) {
    ChatOptions now = options;
    now.tools = tools;
    now.add_generation_prompt = add_generation_prompt;
    return chat.render(messages, now);
  };
}

std::vector<RenderedRow> render_conversation(const OrderedJson& messages, const OrderedJson* tools,
                                             const Render& render, const Tokenizer& tokenizer) {
  RenderedRow whole;
  whole.text = render(messages, tools, false);
  std::vector<RenderedRow> apart;
  bool stable = true;
  for (size_t i = 0; i < messages.size(); ++i) {
    if (!is_answer(messages[i])) continue;
    const Turn turn(messages, i, tools, render, tokenizer);
    stable &= whole.text.starts_with(turn.text());
    whole.answers.push_back(turn.range());
    apart.push_back({turn.text(), {turn.range()}, static_cast<int64_t>(i)});
  }
  if (!stable) return apart;
  return {std::move(whole)};
}

TokenRow mask_tokens(const RenderedRow& row, const Tokenizer& tokenizer, uint64_t* borders) {
  const Encoding encoding = tokenizer.encode_spans(row.text);
  TokenRow out;
  out.ids = encoding.ids;
  out.mask.assign(out.ids.size(), 0);
  out.turn = row.turn;
  size_t first = 0;  // tokens come in order, and so do answers
  for (const auto& [begin, end] : row.answers) {
    while (first < encoding.spans.size() && encoding.spans[first].second <= begin) ++first;
    for (size_t i = first; i < encoding.spans.size() && encoding.spans[i].first < end; ++i) {
      const auto [b, e] = encoding.spans[i];
      out.mask[i] |= b >= begin && e <= end;
      if (borders) *borders += (b < begin && begin < e) + (b < end && end < e);
    }
  }
  out.id = row_id(out.ids, out.mask);
  return out;
}

std::string row_id(std::span<const int32_t> ids, std::span<const uint8_t> mask) {
  std::string bytes;
  bytes.reserve(ids.size() * 5);
  for (int32_t id : ids)
    for (int shift = 0; shift < 32; shift += 8) bytes += static_cast<char>(static_cast<uint32_t>(id) >> shift & 0xFF);
  for (uint8_t m : mask) bytes += static_cast<char>(m);
  return sha256_hex(bytes).substr(0, 16);
}

std::vector<TokenRow> make_token_rows(const Row& row, const Tokenizer& tokenizer, const Render& render,
                                      const MaskOptions& options, RowReport& report) {
  auto drop = [&](const char* reason, std::string_view detail) {
    count_reason(report.dropped[reason], options.strict, row.where, reason, detail);
    return std::vector<TokenRow>();
  };
  std::vector<TokenRow> rows;
  uint64_t borders = 0;
  if (row.kind == Row::Kind::prompts) return drop("prompts without answers", "only --regenerate can use them");
  if (row.kind == Row::Kind::tokens) {
    for (size_t i = 0; i < row.ids.size(); ++i)
      if (row.ids[i] >= tokenizer.size())
        return drop("token id outside the vocabulary",
                    fmt::format("input_ids[{}] is {}, the vocabulary has {}", i, row.ids[i], tokenizer.size()));
    rows.push_back({row.ids, row.mask, row_id(row.ids, row.mask), "", -1, 0});
  } else {
    bool answers = false;
    for (const OrderedJson& message : *row.messages) {
      const auto& role = message.at("role").get_ref<const std::string&>();
      answers |= is_answer(message);
      if (!is_known_role(role))
        count_reason(report.unknown_roles[role], options.strict, row.where, "unknown role", fmt::format("'{}'", role));
    }
    if (!answers) return drop("no answer", "it has no assistant turn");
    try {
      const auto rendered = render_conversation(*row.messages, row.tools.get(), render, tokenizer);
      for (const RenderedRow& r : rendered) rows.push_back(mask_tokens(r, tokenizer, &borders));
    } catch (const Error& e) {
      return drop("refused by the chat template", e.what());
    }
  }
  const bool was_split = rows.size() > 1 || (rows.size() == 1 && rows[0].turn >= 0);
  auto in_loss = [](const TokenRow& r) { return static_cast<uint64_t>(std::count(r.mask.begin(), r.mask.end(), 1)); };
  std::erase_if(rows, [&](const TokenRow& r) { return in_loss(r) == 0; });
  if (rows.empty()) return drop("no token in the loss", "");
  for (TokenRow& r : rows) {
    if (options.max_length <= 0 || static_cast<int64_t>(r.ids.size()) <= options.max_length) continue;
    count_reason(report.cut, options.strict, row.where, "longer than the limit",
                 fmt::format("{} tokens, the limit is {}", r.ids.size(), options.max_length));
    r.ids.resize(static_cast<size_t>(options.max_length));
    r.mask.resize(static_cast<size_t>(options.max_length));
    r.id = row_id(r.ids, r.mask);
  }
  std::erase_if(rows, [&](const TokenRow& r) { return in_loss(r) == 0; });
  if (rows.empty()) return drop("no answer before the length limit", "");
  report.split += was_split;
  report.borders += borders;
  ++report.used;
  report.rows += rows.size();
  const uint64_t conversation = conversation_id(row);
  for (TokenRow& r : rows) {
    r.where = row.where;
    r.conversation = conversation;
    report.tokens += r.ids.size();
    report.loss_tokens += in_loss(r);
  }
  return rows;
}

std::vector<int32_t> prompt_ids(const OrderedJson& messages, const OrderedJson* tools, const Render& render,
                                const Tokenizer& tokenizer) {
  return tokenizer.encode(render(messages, tools, true));
}

}  // namespace dspark::formats
