#include "runtime/blob.hpp"

#include <cstring>
#include <type_traits>

#include "runtime/failure.hpp"

namespace expertwire::runtime {

namespace {

constexpr std::uint32_t magic = 0x31425745;  // "EWB1"
constexpr std::uint64_t field_bytes_max = 4096;
constexpr std::uint64_t regions_max = 65'536;

class Writer {
  public:
    template <class T>
    void number(T value) {
        static_assert(std::is_integral_v<T>);
        for (std::size_t i = 0; i < sizeof(T); ++i)
            out.push_back(static_cast<std::byte>(static_cast<std::make_unsigned_t<T>>(value) >> (8 * i) & 0xff));
    }
    void bytes(const void* data, std::size_t count) {
        number(static_cast<std::uint32_t>(count));
        const auto* first = static_cast<const std::byte*>(data);
        out.insert(out.end(), first, first + count);
    }
    std::vector<std::byte> out;
};

class Reader {
  public:
    Reader(std::span<const std::byte> bytes, std::uint32_t rank) : bytes_(bytes), rank_(rank) {}

    template <class T>
    T number(const char* field) {
        need(sizeof(T), field);
        std::make_unsigned_t<T> value = 0;
        for (std::size_t i = 0; i < sizeof(T); ++i)
            value = static_cast<std::make_unsigned_t<T>>(
                value | static_cast<std::make_unsigned_t<T>>(std::to_integer<std::make_unsigned_t<T>>(bytes_[at_ + i]))
                            << (8 * i));
        at_ += sizeof(T);
        return static_cast<T>(value);
    }
    std::vector<std::byte> bytes(const char* field) {
        const auto count = number<std::uint32_t>(field);
        if (count > field_bytes_max)
            fail(std::string(field) + " has " + std::to_string(count) + " bytes, the limit is " +
                 std::to_string(field_bytes_max));
        need(count, field);
        std::vector<std::byte> value(bytes_.begin() + static_cast<std::ptrdiff_t>(at_),
                                     bytes_.begin() + static_cast<std::ptrdiff_t>(at_ + count));
        at_ += count;
        return value;
    }
    std::string text(const char* field) {
        const auto value = bytes(field);
        return {reinterpret_cast<const char*>(value.data()), value.size()};
    }
    void finish() const {
        if (at_ != bytes_.size()) fail(std::to_string(bytes_.size() - at_) + " bytes follow its end");
    }
    [[noreturn]] void fail(const std::string& why) const {
        throw Failure(FailureKind::invalid_argument,
                      "the blob given for rank " + std::to_string(rank_) + " (" + std::to_string(bytes_.size()) +
                          " bytes) is malformed: " + why + "; pass what that rank's blob() returned, unchanged");
    }

  private:
    void need(std::size_t count, const char* field) const {
        if (bytes_.size() - at_ < count)
            fail(std::string(field) + " needs " + std::to_string(count) + " bytes at " + std::to_string(at_));
    }
    std::span<const std::byte> bytes_;
    std::uint32_t rank_;
    std::size_t at_ = 0;
};

}  // namespace

std::vector<std::byte> encode_blob(const Blob& blob) {
    Writer writer;
    writer.number(magic);
    writer.number(blob.version);
    writer.number(blob.rank);
    writer.number(blob.size);
    writer.number(blob.process.pid);
    writer.number(blob.process.start_time);
    writer.number(blob.process.boot);
    writer.number(blob.process.pid_namespace);
    writer.number(blob.instance);
    writer.number(blob.barrier_epoch);
    writer.bytes(blob.provider.data(), blob.provider.size());
    writer.bytes(blob.address.data(), blob.address.size());
    writer.number(static_cast<std::uint32_t>(blob.regions.size()));
    for (const BlobRegion& region : blob.regions) {
        writer.bytes(region.name.data(), region.name.size());
        writer.number(region.bytes);
        writer.bytes(region.key.data(), region.key.size());
    }
    return std::move(writer.out);
}

Blob decode_blob(std::span<const std::byte> bytes, std::uint32_t from_rank) {
    Reader reader(bytes, from_rank);
    Blob blob;
    if (reader.number<std::uint32_t>("magic") != magic) reader.fail("it does not begin as a blob does");
    blob.version = reader.number<std::uint32_t>("version");
    if (blob.version != Blob::version_now)
        throw Failure(FailureKind::mismatch,
                      "rank " + std::to_string(from_rank) + " speaks blob version " + std::to_string(blob.version) +
                          ", this rank " + std::to_string(Blob::version_now) + ": install the same expertwire on both",
                      static_cast<std::int32_t>(from_rank));
    blob.rank = reader.number<std::uint32_t>("rank");
    blob.size = reader.number<std::uint32_t>("size");
    blob.process.pid = reader.number<std::int32_t>("pid");
    blob.process.start_time = reader.number<std::uint64_t>("start time");
    blob.process.boot = reader.number<std::uint64_t>("boot id");
    blob.process.pid_namespace = reader.number<std::uint64_t>("pid namespace");
    blob.instance = reader.number<std::uint64_t>("instance");
    blob.barrier_epoch = reader.number<std::uint64_t>("barrier epoch");
    blob.provider = reader.text("provider");
    blob.address = reader.bytes("address");
    const auto regions = reader.number<std::uint32_t>("number of regions");
    if (regions > regions_max)
        reader.fail("it announces " + std::to_string(regions) + " regions, the limit is " +
                    std::to_string(regions_max));
    for (std::uint32_t i = 0; i < regions; ++i) {
        BlobRegion region;
        region.name = reader.text("region name");
        region.bytes = reader.number<std::uint64_t>("region size");
        region.key = reader.bytes("region key");
        blob.regions.push_back(std::move(region));
    }
    reader.finish();
    return blob;
}

}  // namespace expertwire::runtime
