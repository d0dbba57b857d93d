#include "net/rendezvous.h"

#include <arpa/inet.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "core/error.h"
#include "core/log.h"
#include "core/stop.h"

namespace dspark::net {

// ---- environment -----------------------------------------------------------------------------------------------------------

namespace {

const char* variable(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != 0 ? value : nullptr;
}

int64_t number(const char* name, int64_t least, int64_t most) {
  const char* value = variable(name);
  DS_REQUIRE(value != nullptr, "{} is not set, though other variables of a run on several ranks are", name);
  int64_t n = 0;
  const auto [end, error] = std::from_chars(value, value + std::strlen(value), n);
  DS_REQUIRE(error == std::errc() && *end == 0 && n >= least && n <= most, "{} is '{}', expected a number from {} to {}", name, value, least, most);
  return n;
}

constexpr int64_t kMostRanks = 1 << 16;

Place from_torchrun() {
  Place p;
  p.size = number("WORLD_SIZE", 1, kMostRanks);
  p.rank = number("RANK", 0, p.size - 1);
  p.local_rank = variable("LOCAL_RANK") ? number("LOCAL_RANK", 0, kMostRanks) : 0;
  p.source = "RANK and WORLD_SIZE";
  if (p.size == 1) return p;
  const char* address = variable("MASTER_ADDR");
  DS_REQUIRE(address != nullptr, "WORLD_SIZE is {}, but MASTER_ADDR is not set: the machine of rank 0", p.size);
  p.address = address;
  p.port = static_cast<int>(variable("MASTER_PORT") ? number("MASTER_PORT", 1, 65534) : 29500);
  if (variable("TORCHELASTIC_USE_AGENT_STORE")) ++p.port;  // torchrun's own store listens there
  return p;
}

Place from_slurm() {
  Place p;
  p.size = number("SLURM_STEP_NUM_TASKS", 1, kMostRanks);
  p.rank = number("SLURM_PROCID", 0, p.size - 1);
  p.local_rank = variable("SLURM_LOCALID") ? number("SLURM_LOCALID", 0, kMostRanks) : 0;
  p.source = "SLURM_PROCID and SLURM_STEP_NUM_TASKS";
  if (p.size == 1) return p;
  const char *address = variable("MASTER_ADDR"), *nodes = variable("SLURM_STEP_NODELIST");
  DS_REQUIRE(address != nullptr || nodes != nullptr, "SLURM_STEP_NUM_TASKS is {}, but neither SLURM_STEP_NODELIST nor MASTER_ADDR is set: the machine of rank 0", p.size);
  p.address = address != nullptr ? address : first_node(nodes);
  // Jobs that share a machine get ports of their own.
  const int64_t job = variable("SLURM_JOB_ID") ? number("SLURM_JOB_ID", 0, INT64_MAX / 64) : 0, step = variable("SLURM_STEP_ID") ? number("SLURM_STEP_ID", 0, INT64_MAX / 64) : 0;
  p.port = static_cast<int>(variable("MASTER_PORT") ? number("MASTER_PORT", 1, 65535) : 15000 + (job * 17 + step) % 15000);
  return p;
}

}  // namespace

std::string first_node(const std::string& list) {
  const size_t bracket = list.find('['), comma = list.find(',');
  if (bracket == std::string::npos || comma < bracket) return list.substr(0, comma);
  const size_t end = list.find_first_of(",-]", bracket);
  return list.substr(0, bracket) + list.substr(bracket + 1, end - bracket - 1);
}

Place place_from_environment(bool expect_none) {
  const char *rank = variable("RANK"), *size = variable("WORLD_SIZE");
  if (rank && size) return from_torchrun();
  if (variable("SLURM_STEP_NUM_TASKS") && variable("SLURM_PROCID")) return from_slurm();
  if (expect_none || (!rank && !size)) return {};
  const bool alone = (rank ? std::strcmp(rank, "0") : std::strcmp(size, "1")) == 0 && !variable("MASTER_ADDR") && !variable("LOCAL_RANK");
  DS_REQUIRE(alone, "{} is '{}', but {} is not set: set both for one of several ranks, or unset {} to train in one process (--ranks N starts N of them on this machine)", rank ? "RANK" : "WORLD_SIZE",
             rank ? rank : size, rank ? "WORLD_SIZE" : "RANK", rank ? "RANK" : "WORLD_SIZE");
  return {};
}

// ---- meeting ---------------------------------------------------------------------------------------------------------------

namespace {

class Socket {
 public:
  explicit Socket(int fd = -1) : fd_(fd) {}
  ~Socket() {
    if (fd_ >= 0) ::close(fd_);
  }
  Socket(Socket&& o) noexcept : fd_(std::exchange(o.fd_, -1)) {}
  Socket& operator=(Socket&& o) noexcept {
    std::swap(fd_, o.fd_);
    return *this;
  }
  int fd() const { return fd_; }
  int release() { return std::exchange(fd_, -1); }

 private:
  int fd_;
};

// What a rank says first on each connection.
struct Hello {
  static constexpr uint32_t kMagic = 0x52445344, kVersion = 1;  // "DSDR"
  uint32_t magic = kMagic, version = kVersion, rank = 0, size = 0, port = 0;
};
// Where a rank listens, as told by rank 0.
struct Contact {
  in6_addr address{};  // IPv4 as mapped
  uint32_t port = 0;
};

using Address = sockaddr_in6;

bool is_loopback(const in6_addr& a) {
  return IN6_IS_ADDR_LOOPBACK(&a) || (IN6_IS_ADDR_V4MAPPED(&a) && a.s6_addr[12] == 127);
}

Address peer_of(int fd) {
  Address a{};
  socklen_t n = sizeof a;
  SYS_CHECK(::getpeername(fd, reinterpret_cast<sockaddr*>(&a), &n), "ask who is connected");
  return a;
}

Socket listen_on(int port) {
  Socket s(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  SYS_CHECK(s.fd(), "make a socket for other ranks");
  const int on = 1, off = 0;
  ::setsockopt(s.fd(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  ::setsockopt(s.fd(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof off);  // IPv4 too
  Address a{};
  a.sin6_family = AF_INET6, a.sin6_addr = in6addr_any, a.sin6_port = htons(static_cast<uint16_t>(port));
  SYS_CHECK(::bind(s.fd(), reinterpret_cast<const sockaddr*>(&a), sizeof a), "listen on port {} for other ranks (MASTER_PORT names another one)", port);
  SYS_CHECK(::listen(s.fd(), 1024), "listen on port {}", port);
  return s;
}

int port_of(const Socket& s) {
  Address a{};
  socklen_t n = sizeof a;
  SYS_CHECK(::getsockname(s.fd(), reinterpret_cast<sockaddr*>(&a), &n), "ask for a port");
  return ntohs(a.sin6_port);
}

}  // namespace

int free_port() { return port_of(listen_on(0)); }

namespace {

void set_options(int fd) {
  const int on = 1;
  ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  ::setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
}

void look_for_stop() {
  if (stop_requested()) stopped("the ranks had not met yet; nothing was begun");
}

bool wait_for(int fd, short events, double until) {
  for (;;) {
    const double left = until - now_s();
    if (left <= 0) return false;
    look_for_stop();
    pollfd p{fd, events, 0};
    const int n = ::poll(&p, 1, static_cast<int>(std::min(left * 1e3 + 1, 250.0)));
    if (n > 0) return true;
    if (n < 0 && errno != EINTR) return false;
  }
}

// False when the connection ended or the time is over.
bool read_all(int fd, void* to, size_t bytes, double until) {
  for (size_t done = 0; done < bytes;) {
    if (!wait_for(fd, POLLIN, until)) return false;
    const auto n = ::recv(fd, static_cast<char*>(to) + done, bytes - done, MSG_DONTWAIT);
    if (n == 0 || (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)) return false;
    if (n > 0) done += static_cast<size_t>(n);
  }
  return true;
}
bool write_all(int fd, const void* from, size_t bytes, double until) {
  for (size_t done = 0; done < bytes;) {
    if (!wait_for(fd, POLLOUT, until)) return false;
    const auto n = ::send(fd, static_cast<const char*>(from) + done, bytes - done, MSG_DONTWAIT | MSG_NOSIGNAL);
    if (n < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR) return false;
    if (n > 0) done += static_cast<size_t>(n);
  }
  return true;
}

// One attempt; -1 when nobody is there (yet).
Socket try_connect(const Address& a, double until) {
  look_for_stop();
  Socket s(::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  SYS_CHECK(s.fd(), "make a socket for other ranks");
  if (::connect(s.fd(), reinterpret_cast<const sockaddr*>(&a), sizeof a) < 0) {
    int error = errno;
    socklen_t n = sizeof error;
    if (error != EINPROGRESS || !wait_for(s.fd(), POLLOUT, std::min(until, now_s() + 5)) || ::getsockopt(s.fd(), SOL_SOCKET, SO_ERROR, &error, &n) < 0 || error != 0) return Socket();
  }
  set_options(s.fd());
  return s;
}

Socket connect_to(const Address& a, double until) {
  for (;;) {
    Socket s = try_connect(a, until);
    if (s.fd() >= 0 || now_s() >= until) return s;
    ::usleep(100000);
  }
}

std::vector<Address> resolve(const std::string& name, int port) {
  addrinfo hints{}, *list = nullptr;
  hints.ai_family = AF_INET6, hints.ai_socktype = SOCK_STREAM, hints.ai_flags = AI_V4MAPPED | AI_ALL;
  const int error = ::getaddrinfo(name.c_str(), std::to_string(port).c_str(), &hints, &list);
  DS_REQUIRE(error == 0, "the machine of rank 0, '{}', cannot be found: {}", name, ::gai_strerror(error));
  std::vector<Address> found;
  for (const addrinfo* i = list; i != nullptr; i = i->ai_next)
    if (i->ai_addrlen == sizeof(Address)) {
      found.emplace_back();
      std::memcpy(&found.back(), i->ai_addr, sizeof(Address));
    }
  ::freeaddrinfo(list);
  DS_REQUIRE(!found.empty(), "the machine of rank 0, '{}', has no address", name);
  return found;
}

// The next rank that comes, after its hello. What is no rank (a port scan) is sent away; a rank of another run is an error.
struct Guest {
  Socket socket;
  Hello hello;
};
Guest accept_one(const Socket& listener, const Place& place, double until, const std::string& missing) {
  for (;;) {
    DS_REQUIRE(wait_for(listener.fd(), POLLIN, until), "rank {} of {} waited in vain for {}; were all started, and can they reach port {} here?", place.rank, place.size, missing, port_of(listener));
    Guest g{Socket(::accept4(listener.fd(), nullptr, nullptr, SOCK_CLOEXEC)), {}};
    if (g.socket.fd() < 0) continue;
    if (!read_all(g.socket.fd(), &g.hello, sizeof g.hello, std::min(until, now_s() + 5)) || g.hello.magic != Hello::kMagic) continue;
    DS_REQUIRE(g.hello.version == Hello::kVersion, "rank {} speaks version {} of the ranks' protocol, rank {} version {}: all must run the same dspark", g.hello.rank, g.hello.version, place.rank, Hello::kVersion);
    DS_REQUIRE(g.hello.size == place.size && g.hello.rank < place.size, "a process says that it is rank {} of {}, but rank {} is one of {}: another run uses this port, or the ranks were started differently", g.hello.rank,
               g.hello.size, place.rank, place.size);
    set_options(g.socket.fd());
    return g;
  }
}

std::string missing_ranks(const std::vector<Socket>& sockets, int64_t first) {
  std::string text;
  int64_t n = 0;
  for (auto r = static_cast<size_t>(first); r < sockets.size(); ++r)
    if (sockets[r].fd() < 0 && ++n <= 8) text += fmt::format("{}{}", text.empty() ? "" : ", ", r);
  return fmt::format("rank{} {}{}", n == 1 ? "" : "s", text, n > 8 ? fmt::format(" and {} more", n - 8) : "");
}

// Takes in ranks [first, size).
void take_in(const Socket& listener, const Place& place, int64_t first, double until, std::vector<Socket>& sockets, std::vector<uint32_t>* ports) {
  for (int64_t left = place.size - first; left > 0; --left) {
    Guest g = accept_one(listener, place, until, missing_ranks(sockets, first));
    const size_t r = g.hello.rank;
    DS_REQUIRE(static_cast<int64_t>(r) >= first && sockets[r].fd() < 0, "two processes say that they are rank {} of {}: every rank is started once", r, place.size);
    sockets[r] = std::move(g.socket);
    if (ports != nullptr) (*ports)[r] = g.hello.port;
  }
}

}  // namespace

std::unique_ptr<Mesh> meet(const Place& place, double deadline_s) {
  const double until = now_s() + deadline_s;
  const auto n = static_cast<size_t>(place.size);
  std::vector<Socket> sockets(n);
  Hello hello;
  hello.rank = static_cast<uint32_t>(place.rank), hello.size = static_cast<uint32_t>(place.size);
  if (place.rank == 0 && n > 1) {
    const Socket listener = listen_on(place.port);
    std::vector<uint32_t> ports(n, 0);
    take_in(listener, place, 1, until, sockets, &ports);
    // Everybody learns where the others listen. A rank on this very machine may have come by its loopback: to those from elsewhere
    // it is where this one is.
    for (size_t to = 1; to < n; ++to) {
      Address here{};
      socklen_t bytes = sizeof here;
      SYS_CHECK(::getsockname(sockets[to].fd(), reinterpret_cast<sockaddr*>(&here), &bytes), "ask for this machine's address");
      std::vector<Contact> contacts(n);
      for (size_t r = 1; r < n; ++r) {
        contacts[r].address = peer_of(sockets[r].fd()).sin6_addr, contacts[r].port = ports[r];
        if (is_loopback(contacts[r].address)) contacts[r].address = here.sin6_addr;
      }
      DS_REQUIRE(write_all(sockets[to].fd(), contacts.data(), contacts.size() * sizeof(Contact), until), "rank {} left before all ranks had come", to);
    }
  } else if (n > 1) {
    const Socket listener = listen_on(0);
    hello.port = static_cast<uint32_t>(port_of(listener));
    const std::vector<Address> addresses = resolve(place.address, place.port);
    for (size_t i = 0; sockets[0].fd() < 0; ++i) {
      DS_REQUIRE(now_s() < until, "rank {} of {} cannot reach rank 0 at {} port {} within {:g} s; was it started, and is the port open?", place.rank, place.size, place.address, place.port, deadline_s);
      sockets[0] = try_connect(addresses[i % addresses.size()], until);
      if (sockets[0].fd() < 0 && i % addresses.size() + 1 == addresses.size()) ::usleep(100000);
    }
    std::vector<Contact> contacts(n);
    DS_REQUIRE(write_all(sockets[0].fd(), &hello, sizeof hello, until) && read_all(sockets[0].fd(), contacts.data(), n * sizeof(Contact), until),
               "rank 0 at {} port {} did not let rank {} of {} in: see what it says; not all ranks may have come in time", place.address, place.port, place.rank, place.size);
    for (size_t r = 1; r < static_cast<size_t>(place.rank); ++r) {
      Address a{};
      a.sin6_family = AF_INET6, a.sin6_addr = contacts[r].address, a.sin6_port = htons(static_cast<uint16_t>(contacts[r].port));
      sockets[r] = connect_to(a, until);
      DS_REQUIRE(sockets[r].fd() >= 0 && write_all(sockets[r].fd(), &hello, sizeof hello, until), "rank {} cannot reach rank {}: is its machine's network closed to this one?", place.rank, r);
    }
    take_in(listener, place, place.rank + 1, until, sockets, nullptr);
  }
  std::vector<int> fds;
  for (Socket& s : sockets) fds.push_back(s.release());
  return std::make_unique<Mesh>(place.rank, std::move(fds), deadline_s);
}

}  // namespace dspark::net
