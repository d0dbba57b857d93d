#include "job/train.h"

#include "job/shapes.h"

#include "commands.h"

namespace dspark::cmd {

void add_train(CLI::App& app) {
  auto o = std::make_shared<job::TrainOptions>();
  CLI::App* sub = app.add_subcommand("train", "a store -> a drafter");
  sub->add_option("--store", o->stores, "hidden-state stores, DeepSpec caches or folders of hs_*.safetensors")->type_name("STORE");
  auto weights = std::make_shared<std::vector<std::string>>();
  sub->add_option("--store-weights", *weights, "how often an epoch visits each store's documents, e.g. 1,0.25,3 (default: 1 each)")->type_name("W,W,...");
  sub->add_option("--target", o->target, "the target the states came from")->type_name("TARGET");
  sub->add_option("--out", o->out, "the run's folder; the same run resumes")->type_name("DIR");
  sub->add_option("--init", o->init, "go on with this drafter: its shape, rope, draft vocabulary and weights; embeddings and head are the target's")->type_name("DRAFTER");
  sub->add_flag("--init-partial", o->init_partial, "what of --init does not fit starts new, instead of an error");
  const char* shape = "Drafter";
  sub->add_option("--algorithm", o->algorithm, "dspark or dflash (no heads; cross-entropy if --loss says nothing else)")->capture_default_str()->group(shape);
  sub->add_option("--layers", o->layers, "decoder layers")->capture_default_str()->group(shape);
  sub->add_option("--hidden", o->hidden, "width (0: the target's; another one trains embeddings and head of its own, without a warm start)")->type_name("D")->capture_default_str()->group(shape);
  sub->add_option("--block", o->block, "tokens of a block")->capture_default_str()->group(shape);
  sub->add_option("--markov", o->markov, "Markov head: vanilla, gated, rnn or none (vLLM serves vanilla only)")->capture_default_str()->group(shape);
  sub->add_option("--rank", o->rank, "of the Markov head")->capture_default_str()->group(shape);
  sub->add_flag("--no-confidence", o->no_confidence, "without a confidence head")->group(shape);
  sub->add_option("--draft-vocab", o->draft_vocab, "keep the N most frequent label tokens (0: all)")->type_name("N")->capture_default_str()->group(shape);
  sub->add_option("--taps", o->taps, "store (all it holds), auto, or layer numbers")->capture_default_str()->group(shape);
  sub->add_option("--layer-types", o->layer_types, "full or sliding; or one for each layer: full,sliding,...")->capture_default_str()->group(shape);
  sub->add_option("--window", o->window, "of sliding layers")->capture_default_str()->group(shape);
  sub->add_flag("--non-causal", o->non_causal, "sliding layers: slots of a block see each other both ways")->group(shape);
  sub->add_option("--window-rule", o->window_rule, "served (as vLLM and llama.cpp do) or anchor")->capture_default_str()->group(shape);
  sub->add_option("--rotary", o->rotary, "what a target's partial_rotary_factor does: served (rotates that part of a head, as servers do) or reference (ignored, as the public trainers do)")->capture_default_str()->group(shape);
  sub->add_option("--layout", o->layout, "anchor (slot k predicts p+k+1) or bonus")->capture_default_str()->group(shape);
  sub->add_option("--mask-token", o->mask_token, "token id of a block's empty slots (-1: the tokenizer's)")->capture_default_str()->group(shape);
  sub->add_option("--warm-start", o->warm_start, "target (copies of its last layers) or none (random)")->capture_default_str()->group(shape);
  const char* objective = "Objective";
  sub->add_option("--recipe", o->recipe, "bundle of defaults: deepspec or speculators; every part can be given alone")->capture_default_str()->group(objective);
  sub->add_option("--loss", o->loss, "terms and weights: ce=0.1,tv=1.8,conf=1 (also kl, rkl, jsd, nla, lk_hybrid)")->type_name("TERMS")->group(objective);
  sub->add_option("--decay", o->decay, "gamma of the slot weights exp(-k/gamma); 0: none")->capture_default_str()->group(objective);
  sub->add_option("--dpace", o->dpace, "alpha of D-PACE weights instead of the decay (0: off; terms: ce alone, and conf; needs --denominator count)")->capture_default_str()->group(objective);
  sub->add_option("--slots", o->slots, "supervised slots: label-prefix (in the document, up to the first masked label) or row-mask (as speculators)")->capture_default_str()->group(objective);
  sub->add_option("--label", o->label, "ce's label: data (the token) or target (its arg-max)")->capture_default_str()->group(objective);
  sub->add_flag("--detach-confidence", o->detach_confidence, "the confidence loss trains its own weights only")->group(objective);
  sub->add_option("--tap-noise", o->tap_noise, "uniform noise of +-X on the taps")->capture_default_str()->group(objective);
  sub->add_option("--denominator", o->denominator, "pooled (whole batch), micro (a micro-step's weights) or count (its slots)")->capture_default_str()->group(objective);
  const char* run = "Run";
  sub->add_option("--steps", o->steps, "optimizer steps")->capture_default_str()->group(run);
  sub->add_option("--epochs", o->epochs, "instead of --steps")->capture_default_str()->group(run);
  sub->add_option("--batch-docs", o->batch_docs, "documents a step (0: chosen by the store's size, at most 512)")->capture_default_str()->group(run);
  sub->add_option("--row-tokens", o->row_tokens, "documents are packed into rows of about this length")->capture_default_str()->group(run);
  sub->add_option("--anchors", o->anchors, "blocks drawn a document (or a row)")->capture_default_str()->group(run);
  sub->add_option("--anchors-per", o->anchors_per, "document, or row (as speculators)")->capture_default_str()->group(run);
  sub->add_option("--chunk-slots", o->chunk_slots, "slots whose logits are held at once")->capture_default_str()->group(run);
  sub->add_option("--optimizer", o->optimizer, "adamw, or muon (matrices by Muon, the rest by AdamW)")->capture_default_str()->group(run);
  sub->add_option("--muon-lr", o->muon_lr, "peak learning rate of Muon's matrices (0: --lr)")->capture_default_str()->group(run);
  sub->add_option("--muon-weight-decay", o->muon_weight_decay, "decoupled, of Muon's matrices")->capture_default_str()->group(run);
  sub->add_option("--lr", o->lr, "peak learning rate")->capture_default_str()->group(run);
  sub->add_option("--schedule", o->schedule, "cosine, linear, half-cosine or constant, after the warm-up")->capture_default_str()->group(run);
  sub->add_option("--weights", o->weights, "new weights as deepspec or speculators draws them")->capture_default_str()->group(run);
  sub->add_option("--warmup", o->warmup, "fraction of the steps")->capture_default_str()->group(run);
  sub->add_option("--weight-decay", o->weight_decay, "decoupled")->capture_default_str()->group(run);
  sub->add_option("--clip", o->clip, "maximal gradient norm (0: none)")->capture_default_str()->group(run);
  sub->add_option("--val-fraction", o->val_fraction, "of the documents, by whole conversations")->capture_default_str()->group(run);
  sub->add_option("--validate-every", o->validate_every, "steps (0: at the end)")->capture_default_str()->group(run);
  sub->add_option("--save-every", o->save_every, "steps between checkpoints (0: at the end and on a stop)")->capture_default_str()->group(run);
  sub->add_option("--keep", o->keep, "newest checkpoints kept, beside the best by validation")->capture_default_str()->group(run);
  sub->add_option("--time-limit", o->time_limit_s, "seconds; then checkpoint and exit 75")->capture_default_str()->group(run);
  sub->add_option("--on-nonfinite", o->on_nonfinite, "a gradient that is not finite: skip its step, or stop")->capture_default_str()->group(run);
  sub->add_option("--ranks", o->planning.ranks, "processes that train together on this machine, each with its share of the threads, or a GPU of its own (--device cuda); with --plan: ranks that share the work, a machine each")->capture_default_str()->group(run);
  sub->add_option("--rank-timeout", o->rank_timeout_s, "seconds that a rank waits for another one, at the start and at any time, before all end with the reason")->capture_default_str()->group(run);
  sub->add_option("--grad-wire", o->planning.grad_wire, "gradients between ranks: fp32 or bf16")->capture_default_str()->group(run);
  sub->add_option("--report", o->report, "one page with the run's curves and numbers; written at the end, on a stop, and at each validation")->type_name("FILE.html")->group(run);
  sub->add_option("--tensorboard", o->tensorboard, "event files for TensorBoard; a resumed run goes on in the same folder")->type_name("DIR")->group(run);
  sub->add_flag("--resume", o->resume, "said for clarity: the same run always resumes")->group(run);
  sub->add_flag("--plan", o->plan, "print memory, work, time and cost of the run on a machine, train nothing")->group(run);
  sub->add_flag("--print-config", o->print_config, "print every value and where it came from, train nothing")->group(run);
  const char* plan = "Plan (with --plan)";
  sub->add_option("--machine", o->planning.machine, "this (measured now), h200, b200, gb300, or a file of peak rates")->type_name("NAME|FILE")->capture_default_str()->group(plan);
  sub->add_option("--shape", o->planning.shape, "plan a drafter without target and store: " + job::shape_names() + ", or a drafter's config.json")->type_name("NAME|FILE")->group(plan);
  sub->add_option("--rows", o->planning.rows, "rows a step, all ranks together (0: one a rank, or what the store gives)")->capture_default_str()->group(plan);
  sub->add_option("--codec-ratio", o->planning.codec_ratio, "of the states on disk or on the wire (0: the store's, else zstd's usual)")->capture_default_str()->group(plan);
  sub->add_option("--price", o->planning.price, "of a machine, an hour: the run's cost")->capture_default_str()->group(plan);
  add_common(*sub, o->common);
  sub->footer("Ranks on several machines are started by srun or torchrun, one process each, and find each other by these variables:\n"
              "  RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT (29500 if not set)\n"
              "  else SLURM_PROCID, SLURM_STEP_NUM_TASKS, SLURM_LOCALID, SLURM_STEP_NODELIST, SLURM_JOB_ID, SLURM_STEP_ID\n"
              "A rank takes the GPU of its number on its machine, or the only one that CUDA_VISIBLE_DEVICES shows.");
  sub->callback([o, sub, weights] {
    o->store_weights = numbers_of(*weights);
    for (const CLI::Option* option : sub->get_options())
      if (option->count() > 0 && !option->get_lnames().empty()) o->given.push_back(option->get_lnames().front());
    job::run_train(*o);
  });
}

}  // namespace dspark::cmd
