// Mesh: the ranks of one run, each connected with each by a byte stream (TCP sockets; socket pairs in tests).
//
// All ranks make the same calls in the same order. What goes from one rank to another begins with a header that says which call it
// belongs to, so that ranks that are out of step are told so instead of being misunderstood. Sums are in rank order on every rank: two
// runs give the same bits. A wait in which nothing comes for the deadline's time is an Error that names the rank and the call; a rank
// that fails says why with abort(), and the others fail with its words. After an error every further call fails. One thread at a time,
// but for interrupt().
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

struct pollfd;

namespace dspark::net {

// What one call sends to each peer and takes from it, in parts that are made and used up while the others still travel.
class Exchange {
 public:
  virtual ~Exchange() = default;
  virtual int64_t out_bytes(int64_t peer) const = 0;  // all together; the peer's in_bytes of this rank
  virtual int64_t in_bytes(int64_t peer) const = 0;
  // The next part for the peer, not empty; the last one was sent.
  virtual std::span<const std::byte> next_out(int64_t peer) = 0;
  // Where the next part of the peer's goes; empty: nowhere before something of another peer has come.
  virtual std::span<std::byte> next_in(int64_t peer) = 0;
  // What next_in gave is full.
  virtual void came(int64_t peer) = 0;
};

class Mesh {
 public:
  // `sockets`: one a rank, this rank's own -1; owned from here on. `deadline_s`: how long a wait may last in which nothing comes.
  Mesh(int64_t rank, std::vector<int> sockets, double deadline_s);
  ~Mesh();
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  int64_t rank() const { return rank_; }
  int64_t size() const { return static_cast<int64_t>(sockets_.size()); }
  double deadline_s() const { return deadline_s_; }

  // `what` (at most 15 characters) names the call in messages and must be the same on all ranks.
  void exchange(const char* what, Exchange& x);
  // values[i] becomes the sum over all ranks of values[i], the same bits everywhere.
  void sum(const char* what, std::span<double> values);
  // Rank 0 gets the texts of all, in rank order; the others an empty list.
  std::vector<std::string> gather(const char* what, const std::string& text);
  // All ranks get rank 0's.
  std::string broadcast(const char* what, const std::string& text);
  // A look between calls: throws when a peer has said that it failed, or is gone while it was expected to go on.
  void check();
  // How a wait is done; a test whose ranks share one emulated machine lets another one at it meanwhile. Empty: wait() alone.
  std::function<void(const std::function<void()>& wait)> around_wait;
  // From any thread: the call that another one is at fails, and so does every later one but abort().
  void interrupt() noexcept;
  // Tells the peers why this rank ends, and ends the connections. Does not throw; does nothing the second time.
  void abort(const std::string& reason) noexcept;

 private:
  struct Header;
  struct Flow;
  void send_some(int64_t peer, Flow& f, Exchange& x, const char* what);
  void receive_some(int64_t peer, Flow& f, Exchange& x, const char* what);
  void check_header(int64_t peer, const Header& h, int64_t bytes, const char* what);
  [[noreturn]] void lost(int64_t peer, const char* what, bool at_header);
  [[noreturn]] void broken(const std::string& why);
  int wait(::pollfd* polls, size_t n, double seconds) const;
  std::string said(int64_t peer);  // of an abort whose header was read

  int64_t rank_;
  std::vector<int> sockets_;
  double deadline_s_;
  uint32_t calls_ = 0;
  std::vector<bool> open_frame_;  // something of ours was cut short: no abort can be told
  int wake_ = -1;                 // an eventfd: interrupt() ends a wait
  std::atomic<bool> interrupted_{false};
  std::string broken_;            // why every further call fails
  bool aborted_ = false;
};

}  // namespace dspark::net
