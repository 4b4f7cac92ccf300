# Not run by us on a Mac: `ruby -c` is all that was.
class Qsf < Formula
  desc "@DESCRIPTION@"
  homepage "@HOME@"
  url "@URL@/qsf-@VERSION@.tar.gz"
  sha256 "@SHA256 qsf-@VERSION@.tar.gz@"
  license "@LICENSE@"

  depends_on "cmake" => :build
  depends_on "lz4"
  depends_on "zstd"

  def install
    system "cmake", "-S", ".", "-B", "build", "-DQSF_BUILD_LIBRARY=ON",
           "-DQSF_BUILD_PROGRAM=ON", *std_cmake_args
    system "cmake", "--build", "build"
    system "cmake", "--install", "build"
    pkgshare.install "qsf/selftest.qsf"
  end

  test do
    assert_match version.to_s, shell_output("#{bin}/qsf --version")
    assert_match "every byte", shell_output("#{bin}/qsf verify #{pkgshare}/selftest.qsf")
  end
end
