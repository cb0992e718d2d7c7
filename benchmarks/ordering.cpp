// What ordering class B costs beside class C on one provider: no engine, two processes, one loop each.
//
//   ordering LIBRARY PROVIDER SOURCE_ADDRESS BYTES WINDOW MILLISECONDS ROUNDS
//
// Every request is one write of BYTES and one signal, WINDOW of them at a time, each in a slot of its own.
//   B  the write asks for delivery-complete; when it is there the signal leaves as an atomic add, delivery-complete
//   too. C  the write carries {slot, use} as immediate data; a message {slot, use, writes} follows at once; the target
//   adds
//      when it has the message and as many immediates, and answers all that it added in one turn in one message.
// A request has ended when its source knows that the signal is there. The target checks at every signal that the
// payload's last word is of that use of the slot, or a later one. Both classes alternate; a line for each turn:
//   CLASS SIGNALS SECONDS CPU_SOURCE CPU_TARGET MEDIAN_LATENCY_NS P90_LATENCY_NS EARLY
// Latency: from the post of the write until the target sees the signal (one clock, one host).
#include <dlfcn.h>
#include <poll.h>
#include <rdma/fabric.h>
#include <rdma/fi_atomic.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_rma.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cinttypes>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr std::size_t kWindowMax = 64, kSamples = 1 << 16, kReceives = 4 * kWindowMax, kBatch = 64;
constexpr std::uint64_t kStuckNs = 10'000'000'000;

[[noreturn]] void fail(const char* format, ...) {
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    std::fputc('\n', stderr);
    va_end(arguments);
    _exit(1);
}

void must(long code, const char* call) {
    if (code < 0) fail("%s failed: %ld", call, code);
}

std::uint64_t now_ns() {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 + static_cast<std::uint64_t>(time.tv_nsec);
}

double cpu_seconds() {
    rusage usage{};
    getrusage(RUSAGE_SELF, &usage);
    const auto seconds = [](const timeval& value) {
        return static_cast<double>(value.tv_sec) + 1e-6 * static_cast<double>(value.tv_usec);
    };
    return seconds(usage.ru_utime) + seconds(usage.ru_stime);
}

// What the two processes share beside the fabric: addresses, the turn, and when each signal's write was posted.
struct Blackboard {
    std::array<unsigned char, 256> name[2];
    std::size_t name_bytes[2];
    std::uint64_t base, key;             // the target's region
    std::atomic<int> ready, turn, idle;  // turn: 0 none, 'B', 'C', 'Q'
    std::atomic<std::uint64_t> posted_ns[kWindowMax];
    std::atomic<std::uint64_t> seen[kWindowMax];  // uses of the slot whose signal the target has seen
    double cpu_target;
    std::uint64_t early, samples;
    std::uint64_t latency_ns[kSamples];
};

// Control of C, and its answer: how many, then slot and use of each.
using Message = std::array<std::uint32_t, 1 + 2 * kWindowMax>;
constexpr std::size_t kControlBytes = 3 * sizeof(std::uint32_t);

struct Context {
    fi_context2 fi{};
    enum class Role : unsigned char { write, signal, answer, receive } role = Role::write;
    std::uint32_t index = 0;
    std::uint64_t operand = 1;
    Message message{};
};

class Side {
  public:
    Side(char** arguments, Blackboard& board, int which)
        : board_(board),
          which_(which),
          bytes_(std::strtoull(arguments[4], nullptr, 10)),
          window_(static_cast<std::uint32_t>(std::strtoul(arguments[5], nullptr, 10))) {
        if (window_ == 0 || window_ > kWindowMax || bytes_ < 8) fail("window 1..%zu, bytes >= 8", kWindowMax);
        region_bytes_ = kWindowMax * sizeof(std::uint64_t) + window_ * bytes_;
        memory_ = static_cast<std::byte*>(
            mmap(nullptr, region_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0));
        if (memory_ == MAP_FAILED) fail("no memory");
        open(arguments[1], arguments[2], arguments[3]);
    }

    void connect() {
        must(fi_av_insert(addresses_, board_.name[1 - which_].data(), 1, &peer_, 0, nullptr), "fi_av_insert");
    }

    // One turn of the source: how many signals it got through.
    std::uint64_t send(char kind, std::uint64_t milliseconds) {
        const std::uint64_t begin = now_ns(), end = begin + milliseconds * 1'000'000;
        std::uint64_t done = 0, last = begin;
        for (;;) {
            const std::uint64_t now = now_ns();
            if (now < end) {
                for (std::uint32_t slot = 0; slot < window_; ++slot) start(kind, slot);
            }
            for (std::uint32_t slot = 0; slot < window_; ++slot) follow(kind, slot);
            const std::uint64_t ended = ended_;
            if (!progress(kind)) sleep();
            done += ended_ - ended;
            if (ended_ != ended) last = now;
            if (now >= end && busy() == 0) return done;
            if (now - last > kStuckNs) fail("source stuck: %u busy", busy());
        }
    }

    // The target, until the turn is over.
    void serve() {
        std::uint64_t early = 0;
        const double cpu = cpu_seconds();
        std::uint64_t samples = 0;
        const char kind = static_cast<char>(board_.turn.load());
        while (board_.turn.load() == kind) {
            const bool moved = progress(kind);
            bool news = false;
            for (std::uint32_t slot = 0; slot < window_; ++slot) {
                const std::uint64_t use = std::atomic_ref(word(slot)).load(std::memory_order_acquire);
                if (use == board_.seen[slot].load(std::memory_order_relaxed)) continue;
                news = true;
                early += stamp(slot) < use;
                if (samples < kSamples) {
                    board_.latency_ns[samples++] = now_ns() - board_.posted_ns[slot].load(std::memory_order_relaxed);
                }
                board_.seen[slot].store(use, std::memory_order_relaxed);
            }
            if (!moved && !news) sleep();
        }
        board_.early = early;
        board_.samples = samples;
        board_.cpu_target = cpu_seconds() - cpu;
        board_.idle.store(1);
    }

  private:
    enum class State : unsigned char { free, written, due, signalled };

    void open(const char* library, const char* provider, const char* source) {
        void* handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
        if (handle == nullptr) fail("%s", dlerror());
        const auto getinfo = reinterpret_cast<decltype(&fi_getinfo)>(dlsym(handle, "fi_getinfo"));
        const auto dupinfo = reinterpret_cast<decltype(&fi_dupinfo)>(dlsym(handle, "fi_dupinfo"));
        const auto open_fabric = reinterpret_cast<decltype(&fi_fabric)>(dlsym(handle, "fi_fabric"));
        fi_info* hints = dupinfo(nullptr);
        hints->caps = FI_MSG | FI_RMA | FI_ATOMIC;
        hints->mode = FI_CONTEXT | FI_CONTEXT2;
        hints->ep_attr->type = FI_EP_RDM;
        hints->domain_attr->mr_mode = FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;
        hints->domain_attr->cq_data_size = sizeof(std::uint32_t);
        hints->tx_attr->op_flags = FI_DELIVERY_COMPLETE;
        hints->fabric_attr->prov_name = strdup(provider);
        const char* node = *source != '\0' ? source : nullptr;
        must(getinfo(FI_VERSION(1, 17), node, nullptr, node != nullptr ? std::uint64_t{FI_SOURCE} : 0, hints, &info_),
             "fi_getinfo");
        info_->tx_attr->op_flags = 0;
        must(open_fabric(info_->fabric_attr, &fabric_, nullptr), "fi_fabric");
        must(fi_domain(fabric_, info_, &domain_, nullptr), "fi_domain");
        fi_cq_attr queue{};
        queue.format = FI_CQ_FORMAT_DATA;
        queue.size = 8 * kReceives;
        queue.wait_obj = FI_WAIT_FD;
        must(fi_cq_open(domain_, &queue, &queue_, nullptr), "fi_cq_open");
        must(fi_control(&queue_->fid, FI_GETWAIT, &descriptor_), "FI_GETWAIT");
        fi_av_attr addresses{};
        must(fi_av_open(domain_, &addresses, &addresses_, nullptr), "fi_av_open");
        must(fi_endpoint(domain_, info_, &endpoint_, nullptr), "fi_endpoint");
        must(fi_ep_bind(endpoint_, &addresses_->fid, 0), "fi_ep_bind");
        must(fi_ep_bind(endpoint_, &queue_->fid, FI_TRANSMIT | FI_RECV), "fi_ep_bind");
        must(fi_enable(endpoint_), "fi_enable");
        must(fi_mr_reg(domain_, memory_, region_bytes_, FI_READ | FI_WRITE | FI_REMOTE_READ | FI_REMOTE_WRITE, 0,
                       static_cast<std::uint64_t>(which_) + 1, 0, &registration_, nullptr),
             "fi_mr_reg");
        board_.name_bytes[which_] = board_.name[which_].size();
        must(fi_getname(&endpoint_->fid, board_.name[which_].data(), &board_.name_bytes[which_]), "fi_getname");
        if (which_ == 1) {
            const bool offsets = (info_->domain_attr->mr_mode & FI_MR_VIRT_ADDR) == 0;
            board_.base = offsets ? 0 : reinterpret_cast<std::uintptr_t>(memory_);
            board_.key = fi_mr_key(registration_);
        }
        for (std::uint32_t index = 0; index < kReceives; ++index) {
            receives_[index].role = Context::Role::receive;
            post_receive(receives_[index]);
        }
        for (std::uint32_t index = 0; index < kWindowMax; ++index) {
            writes_[index].index = signals_[index].index = index;
            signals_[index].role = Context::Role::signal;
            answers_[index].role = Context::Role::answer;
            free_answers_.push_back(&answers_[index]);
        }
    }

    void post_receive(Context& context) {
        must(fi_recv(endpoint_, context.message.data(), sizeof(context.message), nullptr, FI_ADDR_UNSPEC, &context.fi),
             "fi_recv");
    }

    std::uint64_t& word(std::uint32_t slot) { return reinterpret_cast<std::uint64_t*>(memory_)[slot]; }
    std::size_t place(std::uint32_t slot) const { return kWindowMax * sizeof(std::uint64_t) + slot * bytes_; }
    std::uint64_t stamp(std::uint32_t slot) const {
        std::uint64_t value = 0;
        std::memcpy(&value, memory_ + place(slot) + bytes_ - sizeof(value), sizeof(value));
        return value;
    }
    std::uint32_t busy() const {
        return static_cast<std::uint32_t>(
            std::count_if(state_.begin(), state_.end(), [](State state) { return state != State::free; }));
    }

    void start(char kind, std::uint32_t slot) {
        if (state_[slot] != State::free || in_flight_[slot] != 0) return;
        const std::uint64_t use = uses_[slot] + 1;
        std::memcpy(memory_ + place(slot) + bytes_ - sizeof(use), &use, sizeof(use));
        board_.posted_ns[slot].store(now_ns(), std::memory_order_relaxed);
        iovec piece{memory_ + place(slot), bytes_};
        fi_rma_iov target{board_.base + place(slot), bytes_, board_.key};
        fi_msg_rma message{};
        message.msg_iov = &piece;
        message.iov_count = 1;
        message.addr = peer_;
        message.rma_iov = &target;
        message.rma_iov_count = 1;
        message.context = &writes_[slot].fi;
        message.data = slot | (use << 8 & 0xffff'ffff);
        const std::uint64_t flags = FI_COMPLETION | (kind == 'C' ? FI_REMOTE_CQ_DATA : FI_DELIVERY_COMPLETE);
        const long code = fi_writemsg(endpoint_, &message, flags);
        if (code == -FI_EAGAIN) return;
        must(code, "fi_writemsg");
        uses_[slot] = use;
        ++in_flight_[slot];
        state_[slot] = kind == 'C' ? State::due : State::written;
    }

    void follow(char kind, std::uint32_t slot) {
        if (state_[slot] != State::due) return;
        Context& context = signals_[slot];
        long code = 0;
        if (kind == 'C') {
            context.message = {1, slot, static_cast<std::uint32_t>(uses_[slot])};
            code = fi_send(endpoint_, context.message.data(), kControlBytes, nullptr, peer_, &context.fi);
        } else {
            fi_ioc piece{&context.operand, 1};
            fi_rma_ioc target{board_.base + slot * sizeof(std::uint64_t), 1, board_.key};
            fi_msg_atomic message{};
            message.msg_iov = &piece;
            message.iov_count = 1;
            message.addr = peer_;
            message.rma_iov = &target;
            message.rma_iov_count = 1;
            message.datatype = FI_UINT64;
            message.op = FI_SUM;
            message.context = &context.fi;
            code = fi_atomicmsg(endpoint_, &message, FI_COMPLETION | FI_DELIVERY_COMPLETE);
        }
        if (code == -FI_EAGAIN) return;
        must(code, "the signal");
        ++in_flight_[slot];
        state_[slot] = State::signalled;
    }

    bool progress(char kind) {
        std::array<fi_cq_data_entry, kBatch> entries;
        const long got = fi_cq_read(queue_, entries.data(), entries.size());
        if (got == -FI_EAVAIL) {
            fi_cq_err_entry error{};
            fi_cq_readerr(queue_, &error, 0);
            fail("completion error %d (%s)", error.err, which_ == 0 ? "source" : "target");
        }
        for (long index = 0; index < got; ++index) {
            const fi_cq_data_entry& entry = entries[static_cast<std::size_t>(index)];
            if ((entry.flags & FI_REMOTE_CQ_DATA) != 0) {
                counted(static_cast<std::uint32_t>(entry.data & 0xff), static_cast<std::uint32_t>(entry.data >> 8));
                continue;
            }
            complete(kind, *static_cast<Context*>(entry.op_context), entry.len);
        }
        answer();
        return got > 0;
    }

    void complete(char kind, Context& context, std::size_t length) {
        if (context.role == Context::Role::receive) {
            received(context, length);
            return;
        }
        if (context.role == Context::Role::answer) {
            free_answers_.push_back(&context);
            return;
        }
        --in_flight_[context.index];
        if (kind != 'B') return;
        if (context.role == Context::Role::write) state_[context.index] = State::due;
        if (context.role == Context::Role::signal) end(context.index);
    }

    void end(std::uint32_t slot) {
        state_[slot] = State::free;
        ++ended_;
    }

    void received(Context& context, std::size_t length) {
        const Message& raw = context.message;
        if (length < (1 + 2 * std::size_t{raw[0]}) * sizeof(raw[0])) fail("a message of %zu bytes", length);
        for (std::uint32_t index = 0; index < raw[0]; ++index) {
            const std::uint32_t slot = raw[1 + 2 * index], use = raw[2 + 2 * index];
            if (which_ == 0) {
                end(slot);
            } else {
                expected_[slot] = use;
                apply(slot);
            }
        }
        post_receive(context);
    }

    void counted(std::uint32_t slot, std::uint32_t use) {
        arrived_[slot] = use;
        apply(slot);
    }

    // 24 bits of the use travel with the immediate; one write a request, so "as many as it said" is this use's own.
    void apply(std::uint32_t slot) {
        if ((expected_[slot] & 0xff'ffff) != arrived_[slot] || applied_[slot] == expected_[slot]) return;
        applied_[slot] = expected_[slot];
        std::atomic_ref(word(slot)).fetch_add(1, std::memory_order_release);
        unanswered_.push_back(slot);
    }

    void answer() {
        while (!unanswered_.empty() && !free_answers_.empty()) {
            Context& context = *free_answers_.back();
            Message& raw = context.message;
            raw[0] = static_cast<std::uint32_t>(unanswered_.size());
            for (std::uint32_t index = 0; index < raw[0]; ++index) {
                raw[1 + 2 * index] = unanswered_[index];
                raw[2 + 2 * index] = applied_[unanswered_[index]];
            }
            const long code =
                fi_send(endpoint_, raw.data(), (1 + 2 * raw[0]) * sizeof(std::uint32_t), nullptr, peer_, &context.fi);
            if (code == -FI_EAGAIN) return;
            must(code, "the answer");
            free_answers_.pop_back();
            unanswered_.clear();
        }
    }

    void sleep() {
        fid* objects[] = {&queue_->fid};
        if (!unanswered_.empty() || fi_trywait(fabric_, objects, 1) != FI_SUCCESS) return;
        pollfd item{descriptor_, POLLIN, 0};
        ::poll(&item, 1, 1);
    }

    Blackboard& board_;
    int which_;
    std::size_t bytes_, region_bytes_ = 0;
    std::uint32_t window_;
    std::byte* memory_ = nullptr;
    fi_info* info_ = nullptr;
    fid_fabric* fabric_ = nullptr;
    fid_domain* domain_ = nullptr;
    fid_cq* queue_ = nullptr;
    fid_av* addresses_ = nullptr;
    fid_ep* endpoint_ = nullptr;
    fid_mr* registration_ = nullptr;
    fi_addr_t peer_ = 0;
    int descriptor_ = -1;
    std::uint64_t ended_ = 0;
    std::array<State, kWindowMax> state_{};
    std::array<std::uint64_t, kWindowMax> uses_{};
    std::array<int, kWindowMax> in_flight_{};
    std::array<std::uint32_t, kWindowMax> expected_{}, arrived_{}, applied_{};
    std::array<Context, kWindowMax> writes_{}, signals_{}, answers_{};
    std::array<Context, kReceives> receives_{};
    std::vector<std::uint32_t> unanswered_;
    std::vector<Context*> free_answers_;
};

void print_turn(char kind, Blackboard& board, std::uint64_t signals, double seconds, double cpu) {
    std::sort(board.latency_ns, board.latency_ns + board.samples);
    const auto quantile = [&](double share) {
        const auto index = static_cast<std::size_t>(share * static_cast<double>(board.samples));
        return board.samples == 0 ? std::uint64_t{0} : board.latency_ns[std::min(index, board.samples - 1)];
    };
    std::printf("%c %" PRIu64 " %.6f %.6f %.6f %" PRIu64 " %" PRIu64 " %" PRIu64 "\n", kind, signals, seconds, cpu,
                board.cpu_target, quantile(0.5), quantile(0.9), board.early);
    std::fflush(stdout);
}

int run_source(char** arguments, Blackboard& board) {
    Side side(arguments, board, 0);
    board.ready.fetch_add(1);
    while (board.ready.load() < 2) usleep(1000);
    side.connect();
    const auto milliseconds = std::strtoull(arguments[6], nullptr, 10);
    const auto rounds = std::strtoull(arguments[7], nullptr, 10);
    for (std::uint64_t round = 0; round < 2 * (rounds + 1); ++round) {
        const char kind = (round + round / 2) % 2 == 0 ? 'B' : 'C';  // B C C B …: neither is always first
        board.idle.store(0);
        board.turn.store(kind);
        const double cpu = cpu_seconds();
        const std::uint64_t begin = now_ns();
        const std::uint64_t signals = side.send(kind, round < 2 ? 50 : milliseconds);
        const double seconds = 1e-9 * static_cast<double>(now_ns() - begin);
        const double used = cpu_seconds() - cpu;
        board.turn.store(0);
        while (board.idle.load() == 0) usleep(100);
        if (round >= 2) print_turn(kind, board, signals, seconds, used);  // the first two make connections
    }
    board.turn.store('Q');
    return 0;
}

int run_target(char** arguments, Blackboard& board) {
    Side side(arguments, board, 1);
    board.ready.fetch_add(1);
    while (board.ready.load() < 2) usleep(1000);
    side.connect();
    for (;;) {
        const int turn = board.turn.load();
        if (turn == 'Q' || getppid() == 1) return 0;
        if (turn != 0 && board.idle.load() == 0) side.serve();
    }
}

}  // namespace

int main(int count, char** arguments) {
    if (count != 8) fail("usage: ordering LIBRARY PROVIDER SOURCE_ADDRESS BYTES WINDOW MILLISECONDS ROUNDS");
    void* shared = mmap(nullptr, sizeof(Blackboard), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) fail("no shared memory");
    auto& board = *new (shared) Blackboard{};
    const pid_t child = fork();
    if (child == 0) _exit(run_target(arguments, board));
    const int status = run_source(arguments, board);
    int ended = 0;
    waitpid(child, &ended, 0);
    return status != 0 ? status : WEXITSTATUS(ended);
}
