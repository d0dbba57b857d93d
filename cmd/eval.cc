#include "job/eval.h"

#include "commands.h"

namespace dspark::cmd {

void add_eval(CLI::App& app) {
  auto o = std::make_shared<job::EvalOptions>();
  CLI::App* sub = app.add_subcommand("eval", "acceptance and speed by real speculative decoding");
  sub->add_option("--target", o->target, "Hugging Face folder or .gguf file")->type_name("TARGET");
  sub->add_option("--drafter", o->drafters, "drafter folders; several are compared with the first, paired by prompt")->type_name("DRAFTER");
  sub->add_option("--data", o->data, "tasks: JSON lines with turns (or any row with a user turn)")->type_name("TASK.jsonl");
  sub->add_option("--prompt", o->prompt, "answer this and show accepted tokens in colour")->type_name("TEXT");
  sub->add_flag("--chat", o->chat, "talk to the target with the drafter at work");
  sub->add_option("--temperature", o->temperature, "0 is greedy")->capture_default_str();
  sub->add_option("--top-k", o->top_k, "0: all")->capture_default_str();
  sub->add_option("--top-p", o->top_p, "nucleus")->capture_default_str();
  sub->add_option("--min-p", o->min_p, "relative to the most likely token")->capture_default_str();
  sub->add_option("--max-new-tokens", o->max_new_tokens, "tokens of an answer")->capture_default_str();
  sub->add_option("--max-length", o->max_length, "prompt and answer together")->capture_default_str();
  sub->add_option("--limit", o->limit, "prompts a task (0: all)")->capture_default_str();
  sub->add_flag("!--no-plain", o->plain, "do not decode without drafting as well (no speedup is reported then)");
  add_common(*sub, o->common);
  sub->callback([o] { job::run_eval(*o); });
}

}  // namespace dspark::cmd
